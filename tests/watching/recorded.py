"""What the recorder has of two groups; in a process of its own, as the recorder forgets no earlier group."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from azureml_strategy.watching import recorder

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
second = dist.new_group([0])
for _ in range(3):
    dist.all_reduce(torch.ones(1000))
dist.broadcast(torch.ones(10, dtype=torch.bfloat16), 0, group=second)
trace = recorder.record(stacks=False)
assert trace is not None
found = {each.operation: each for each in recorder.collectives(trace) if each.group in trace["pg_config"]}
assert str(found["all_reduce"]) == f"all_reduce #{found['all_reduce'].number} of 4.0 KB"
assert found["all_reduce"].over
assert found["all_reduce"].ranks == (0,)
assert found["broadcast"].size_bytes == 20
assert recorder.counts()[found["all_reduce"].group] >= 3
dist.destroy_process_group()
