"""A `fit` in which some ranks get SIGTERM during the fourth batch, or with `early` while their data is set up."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from common import Regression, loader, quiet_trainer, report
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import azureml_strategy  # noqa: F401 - registers the names

SIGNALLED = [int(rank) for rank in sys.argv[1].split(",")]
EARLY = sys.argv[3:] == ["early"]


class Terminate(Callback):
    """Signals this process, and records how the fit ends."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not EARLY and batch_idx == 3 and trainer.global_rank in SIGNALLED:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        code = getattr(exception, "code", None)
        report(trainer.global_rank, step=trainer.global_step, exception=type(exception).__name__, code=code)


class Model(Regression):
    def train_dataloader(self) -> DataLoader[Any]:
        if EARLY and self.global_rank in SIGNALLED:
            os.kill(os.getpid(), signal.SIGTERM)
        return loader()


checkpoint = ModelCheckpoint(filename="saved", save_on_exception=True)
trainer = quiet_trainer(
    strategy="azureml_ddp",
    devices=int(sys.argv[2]),
    max_epochs=5000,
    callbacks=[Terminate(), checkpoint],
    enable_checkpointing=True,
)
trainer.fit(Model())
