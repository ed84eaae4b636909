"""A training whose checkpoints are written slowly, of which one rank's disk and one rank's memory refuse one each."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from common import report
from lightning.pytorch import Callback, Trainer
from noisy import Tokens, fit

from azureml_strategy.checkpoint import JobCheckpoint, writer
from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.checkpoint.host_copy import HostCopyBuffer
from strategies import OPTIONS, STRATEGIES, tiny_gpt

strategy, output = sys.argv[1], Path(sys.argv[2])
REFUSED, STOP = 4, 7  # steps
TOO_LARGE = 1  # of the copies: the first, of step 2
folder = CheckpointFolder(output / "checkpoints")
rank = int(os.environ["RANK"])
threads: set[str] = set()
copies: list[int] = []
stage, copy = writer.stage, HostCopyBuffer.copy


def take_time(path: Path) -> None:
    threads.add(threading.current_thread().name)
    time.sleep(0.3)
    if rank == 1 and f"step={REFUSED}" in path.name:
        raise OSError("this disk is full")


def stage_slowly(*arguments: Any) -> Any:
    """As it is, but each rank takes its time, and rank 1's disk fails once."""
    staged = stage(*arguments)
    if staged is None:
        return None
    content, write = staged

    def write_slowly(content: Any, path: Path, exchange: Any) -> None:
        exchange.on_all_ranks(lambda: take_time(path))
        write(content, path, exchange)

    return content, write_slowly


def copy_but_once(buffer: HostCopyBuffer, content: Any) -> Any:
    """As it is, but rank 1 has too little memory for one of them."""
    copies.append(len(copies) + 1)
    if rank == 1 and copies[-1] == TOO_LARGE:
        raise MemoryError("not 1 byte")
    return copy(buffer, content)


class StopHere(Callback):
    """Right after a checkpoint was begun, somebody wants one that is complete."""

    complete: list[int] | None = None
    path: str | None = None

    def on_step_boundary(self, trainer: Trainer) -> None:
        if trainer.global_step == STOP and self.complete is None:
            saver = trainer.checkpoint_callback
            assert isinstance(saver, JobCheckpoint)
            self.path = saver.save_now(trainer, "asked")
            self.complete = [each.step for each in folder.complete()]


writer.stage = stage_slowly
HostCopyBuffer.copy = copy_but_once
stop = StopHere()
own = {} if strategy == "ddp" else {"module": tiny_gpt(), "data": Tokens()}
arguments = {"max_epochs": 1, "limit_val_batches": 0, **OPTIONS.get(strategy, {})}
checkpoint = {"monitor": None, "every_n_train_steps": 2, "keep_last": 20}
result = fit(output, stop, strategy=STRATEGIES[strategy](), checkpoint=checkpoint, **own, **arguments)
report(
    rank,
    threads=sorted(threads),
    asked=Path(stop.path or "").name,
    complete=stop.complete,
    last=Path(result["last"]).name,
)
