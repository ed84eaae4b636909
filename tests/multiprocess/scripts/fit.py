"""One `fit`, with the Trainer's arguments from the command line; twice with `again`.

With `tested` rank 0 tests alone afterwards, as Lightning advises.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed as dist
from common import Regression, loader, parameters, quiet_trainer, report

broadcasts: list[int] = []  # the steps done when each was called
broadcast = dist.broadcast


def counted(*arguments: Any, **named: Any) -> Any:
    broadcasts.append(trainer.global_step)
    return broadcast(*arguments, **named)


dist.broadcast = counted
arguments: dict[str, Any] = eval(sys.argv[1])
if arguments.pop("plugin", True):
    import azureml_strategy  # noqa: F401 - registers the names

tested = arguments.pop("tested", False)
for _ in range(2 if arguments.pop("again", False) else 1):
    model = Regression()
    trainer = quiet_trainer(**arguments)
    trainer.fit(model, loader())
rows = len(model.read)
if tested and trainer.is_global_zero:
    quiet_trainer(devices=1, num_nodes=1).test(model, loader(), verbose=False)
report(
    trainer.global_rank,
    tested=len(model.read) - rows,
    world_size=trainer.world_size,
    num_nodes=trainer.num_nodes,
    strategy=type(trainer.strategy).__name__,
    losses=model.losses,
    broadcasts=broadcasts,
    read=model.read[:rows],
    parameters=parameters(model),
    environ={
        name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "CUDA_VISIBLE_DEVICES")
    },
)
if dist.is_initialized():
    dist.barrier()  # the end of a node's first process is the end of those that it started
