"""A `fit` in which some ranks get SIGTERM during the fourth batch, or with `early` while their data is set up.

With `handlers` the script has a handler of its own, and a callback and the module set others during the fit; each calls
the one before, as a careful handler does, and notes whether the checkpoint is there. With `raises` it raises.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from common import Regression, loader, quiet_trainer, report
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import azureml_strategy  # noqa: F401 - registers the names

SIGNALLED = [int(rank) for rank in sys.argv[1].split(",")]
MODE = sys.argv[3] if len(sys.argv) > 3 else ""
EARLY = MODE == "early"
called: list[str] = []


class StoppedError(Exception):
    """The script's own."""


def handle(name: str) -> None:
    """Set a handler that notes its call."""
    before = signal.getsignal(signal.SIGTERM)

    def handler(signum: int, frame: FrameType | None) -> None:
        assert (signum, frame is None) == (signal.SIGTERM, False)
        called.append(f"{name}, {'saved' if any(Path().rglob('saved.ckpt')) else 'not saved'}")
        if callable(before):
            before(signum, frame)
        if MODE == "raises":
            raise StoppedError

    signal.signal(signal.SIGTERM, handler)


class Terminate(Callback):
    """Signals this process, and records how the fit ends."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if MODE == "handlers":
            handle("callback")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not EARLY and batch_idx == 3 and trainer.global_rank in SIGNALLED:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        code = getattr(exception, "code", None)
        report(
            trainer.global_rank,
            step=trainer.global_step,
            exception=type(exception).__name__,
            code=code,
            called=called,
            received=trainer.received_sigterm,
        )


class Model(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if MODE == "handlers" and self.trainer.global_step == 1:
            handle("module")

    def train_dataloader(self) -> DataLoader[Any]:
        if EARLY and self.global_rank in SIGNALLED:
            os.kill(os.getpid(), signal.SIGTERM)
        return loader()


if MODE in ("handlers", "raises"):
    handle("script")
checkpoint = ModelCheckpoint(filename="saved", save_on_exception=True)
trainer = quiet_trainer(
    strategy="azureml_ddp",
    devices=int(sys.argv[2]),
    max_epochs=5000,
    callbacks=[Terminate(), checkpoint],
    enable_checkpointing=True,
)
trainer.fit(Model())
