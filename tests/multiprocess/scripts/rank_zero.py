"""Rank 0 converts a checkpoint of ZeRO for longer than the process group lets the others wait, or fails at it."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from common import report
from lightning.pytorch import LightningModule, Trainer

from azureml_strategy.strategies import AzureMLDeepSpeedStrategy
from azureml_strategy.strategies.errors import UnfitCheckpointError
from azureml_strategy.strategies.zero import checkpoint
from azureml_strategy.strategies.zero import checkpoint as universal

RANK = int(os.environ["RANK"])
LIMIT_SECONDS = 5.0
called: list[str] = []
universal.require_convertible = lambda path: None
universal.saved_processes = lambda path: 1
checkpoint.load_universal_checkpoint = lambda engine: called.append("loaded")


def slowly(path: Path) -> None:
    called.append("converted")
    time.sleep(1.5 * LIMIT_SECONDS)


def fail(path: Path) -> None:
    raise OSError("the disk is full")


strategy: Any = AzureMLDeepSpeedStrategy(stage=2)
module = LightningModule()
module.trainer = Trainer(
    accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False, enable_progress_bar=False
)
strategy._lightning_module = module
type(strategy).deepspeed_engine = None
strategy.setup_environment()
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_SECONDS), dist.group.WORLD)
dist.barrier()
error = ""
universal.convert = fail
try:
    strategy._convert(Path("run"), 1)
except UnfitCheckpointError as raised:
    error = str(raised)
universal.convert = slowly
strategy._convert(Path("run"), 1)
report(RANK, error=error, called=called)
