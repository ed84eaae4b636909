"""Training with `NodeCounters` on two nodes with an InfiniBand port each; that of node 1 loses its link."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Regression, loader, quiet_trainer, report
from lightning.pytorch import Callback, Trainer
from torch import Tensor

import azureml_strategy  # noqa: F401 - registers the names
from azureml_strategy.tracking import JobMLFlowLogger, NodeCounters
from azureml_strategy.tracking.counters import THREAD

RANK, NODE = int(os.environ["RANK"]), int(os.environ["RANK"]) // 2
SYSFS = Path(os.environ["RESULTS"]).parent / f"node-{NODE}"
PORT = SYSFS / "class/infiniband/mlx5_ib0/ports/1"


class Logged(Regression):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss, sync_dist=True)
        return loss


class Waits(Callback):
    """Rank 0 waits until it has heard of all nodes; then node 1 loses its link, and rank 0 waits for the warning."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        thread = counters._thread
        if batch_idx == 3 and RANK == 2:
            (PORT / "counters/link_downed").write_text("9")
        if RANK == 0 and thread is not None:
            if batch_idx in (2, 5):
                _wait(lambda: len(thread.figures) == 2)
            elif batch_idx == 4:
                _wait(lambda: thread.warnings)


def _wait(there: Callable[[], Any]) -> None:
    while not there():
        time.sleep(0.01)


(PORT / "counters").mkdir(parents=True, exist_ok=True)
(PORT / "link_layer").write_text("InfiniBand\n")
(PORT / "counters/link_downed").write_text("7")
counters = NodeCounters(interval_s=0.1, sysfs=SYSFS)
trainer = quiet_trainer(
    strategy="azureml_ddp", callbacks=[counters, Waits()], logger=JobMLFlowLogger(folder=SYSFS), log_every_n_steps=1
)
trainer.fit(Logged(), loader(batch_size=2))
report(RANK, steps=trainer.global_step, threads=[each.name for each in threading.enumerate() if each.name == THREAD])
