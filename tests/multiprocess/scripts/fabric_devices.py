"""A Fabric with two devices in a job that has started one process on each node."""

from __future__ import annotations

import torch.distributed as dist
from common import report
from lightning.fabric import Fabric


def work(fabric: Fabric, trainer: str) -> None:
    """Lightning's launcher for the Trainer would keep an argument of this name."""
    report(fabric.global_rank, world_size=fabric.world_size, given=trainer)
    fabric.barrier()
    dist.destroy_process_group()


Fabric(accelerator="cpu", strategy="ddp", devices=2).launch(work, trainer="as typed")
