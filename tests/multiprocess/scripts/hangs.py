"""A `fit` in which something happens to one rank during the fourth batch, or before the first."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from common import Regression, Rows, quiet_trainer, report
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

import azureml_strategy  # noqa: F401 - registers the names
from azureml_strategy.control import process
from azureml_strategy.hang_detection import HangWatch
from azureml_strategy.hang_detection.main_thread import START
from azureml_strategy.hang_detection.peers import Peers

RANK = int(os.environ["RANK"])
HEARD = Path(os.environ["RESULTS"]).with_name("heard")
STOPPED = HEARD.with_name("stopped")
GATE = HEARD.with_name("gate")
REPORT = HEARD.with_name("logs") / "hang.attempt_0" / "report.txt"


class Fate(Callback):
    """What befalls the rank."""

    def __init__(self, fate: str) -> None:
        self.fate = fate

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.fate == "killed at once":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx != 3:
            return
        if self.fate in ("stopped", "holds the lock"):
            STOPPED.write_text(str(os.getpid()))
            while not HEARD.exists():
                time.sleep(0.05)
        if self.fate == "holds the lock":
            os.mkfifo(GATE)
            ctypes.PyDLL(None).open(str(GATE).encode(), os.O_RDONLY)  # until somebody opens it to write
        if self.fate in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if self.fate == "killed" else signal.SIGSTOP)
        elif self.fate == "raises":
            raise ValueError("the labels of shard 7 are missing")


class EarlyFate(Callback):
    """Befalls a rank before it meets the others' watches."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def go_on_after_the_report() -> None:
    """Have what hangs go on, once it is reported."""
    while not (REPORT.exists() and (GATE.exists() or STOPPED.exists())):
        time.sleep(0.05)
    if GATE.exists():
        os.close(os.open(GATE, os.O_WRONLY))
    elif STOPPED.exists():
        os.kill(int(STOPPED.read_text()), signal.SIGCONT)


class Listener(Callback):
    """Says when this rank has heard that another's start is over, in which that may be silent for long."""

    def __init__(self, other: int) -> None:
        self.other = other

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        watch = next(each._watch for each in trainer.callbacks if isinstance(each, HangWatch))
        threading.Thread(target=self._say, args=(watch._peers,), daemon=True).start()

    def _say(self, peers: Peers) -> None:
        while peers.last(self.other).phase == START:
            time.sleep(0.05)
        HEARD.touch()


class Unhurried(Callback):
    """Leaves the watch the time to see that training goes on after its report."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if REPORT.exists():
            time.sleep(1)


class Recorder(Callback):
    """How the fit ends."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        report(trainer.global_rank, exception=type(exception).__name__, notes=getattr(exception, "__notes__", []))


class StallingRows(Rows):
    """Rows of which one never comes, or when that has been reported."""

    def __init__(self, passes: bool) -> None:
        super().__init__()
        self.passes = passes
        self.read = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        while self.read == 14 and not (self.passes and REPORT.exists()):
            time.sleep(0.05)
        return super().__getitem__(index)


class LongValidation(Regression):
    """Whose validation takes longer than a stall, though no batch of it does."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        time.sleep(0.4)
        super().validation_step(batch, batch_idx)


def vanish() -> None:
    """Train in a process whose end nobody reports, as if a node had lost its power."""
    trained = os.fork()
    if trained:

        def end(*_: Any) -> None:
            os.kill(trained, signal.SIGKILL)
            os.waitpid(trained, 0)  # else the emulator waits for a zombie where no init collects it
            sys.exit()

        signal.signal(signal.SIGTERM, end)
        while True:
            time.sleep(0.05)  # in place of a pause: a signal that comes right before it is handled after it


def main(rank: int, fate: str, strategy: str = "azureml_ddp", machines: bool = False, **watch: Any) -> None:
    passes = fate in ("stopped", "holds the lock", "loader") and not watch.get("kill")
    if rank == RANK and fate in ("killed", "killed at once", "killed before", "stopped") and not passes:
        vanish()
    if machines:
        process._table = lambda: str(RANK)  # type: ignore[assignment]
    rows = StallingRows(passes) if rank == RANK and fate == "loader" else Rows()
    if passes and rank != RANK:
        threading.Thread(target=go_on_after_the_report, daemon=True).start()
    early = [EarlyFate()] if rank == RANK and fate == "killed before" else []
    own = [Fate(fate) if rank == RANK else Listener(rank), *([Unhurried()] if passes else [])]
    trainer = quiet_trainer(
        strategy=strategy,
        max_epochs=1 if fate == "none" or passes else 50,
        limit_val_batches=4 if fate == "none" else 0,
        callbacks=[*early, HangWatch(**{"beat_s": 0.1, "dead_after_s": 60, **watch}), *own, Recorder()],
    )
    trainer.fit(LongValidation(), DataLoader(rows, batch_size=4), DataLoader(Rows(), batch_size=4))
    report(RANK, finished=True)


torch.set_num_threads(1)
main(**json.loads(sys.argv[1]))
