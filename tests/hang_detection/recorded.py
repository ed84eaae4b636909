"""A process with two groups, whose flight recorder is read: what it shows, and the trace as a file.

A process of its own, as a rank is: the recorder is one for a process, and keeps what it has seen in it.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from azureml_strategy.hang_detection import flight_recorder


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    dist.all_reduce(torch.ones(10))  # of another group of this name, as far as one can tell
    since, second = time.time(), dist.new_group([0])
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))
    dist.broadcast(torch.ones(10, dtype=torch.bfloat16), 0, group=second)
    trace = _when_over(since)
    (folder / "traces").mkdir()
    (folder / "traces" / "rank_0").write_bytes(pickle.dumps(trace))
    shown = [{**dataclasses.asdict(each), "text": str(each)} for each in flight_recorder.collectives(trace)]
    print(json.dumps({"shown": shown, "names": [each["profiling_name"] for each in trace["entries"]]}))
    dist.destroy_process_group()


def _when_over(since: float) -> flight_recorder.Trace:
    """The trace once all is over in it: gloo says so in a thread of its own, after the call has returned."""
    deadline = time.monotonic() + 60
    while True:
        trace = flight_recorder.record(False, since)
        assert trace is not None
        if all(each.over for each in flight_recorder.collectives(trace)) or time.monotonic() > deadline:
            return trace
        time.sleep(0.01)


if __name__ == "__main__":
    main()
