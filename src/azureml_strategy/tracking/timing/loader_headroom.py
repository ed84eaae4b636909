"""`DataHeadSpace`, the callback that measures what a perfect loader would gain."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from azureml_strategy.lightning_internals import (
    DataLoaderIterDataFetcher,
    accumulates,
    data_fetcher,
    logged_step,
    training_loaders,
)

# The loader and the memory take turns, so that a machine that becomes slower or faster meanwhile affects both.
_ROUNDS = 3
# Steps after each change that do not count, besides those whose batches are read ahead.
_SETTLING = 3
# How long the training waits at most until the workers are idle.
_MOST_WAIT_S = 20.0
# Below this part of a step, the loader keeps up.
_NEGLIGIBLE = 0.03


class LoaderHeadroom(NamedTuple):
    """Seconds a step, with the run's own loader and with batches from memory: medians over the rounds."""

    loader_s: float
    memory_s: float

    @property
    def share(self) -> float:
        """The part of a step that a perfect loader would save; noise can make it less than 0."""
        return 1 - self.memory_s / self.loader_s

    def text(self) -> str:
        """One or two sentences for the console."""
        figures = f"{self.loader_s:.4g} s a step with its loader, {self.memory_s:.4g} s with batches from memory"
        if self.share < _NEGLIGIBLE:
            return f"Head-space of the data: none, the loader keeps up ({figures})."
        return (
            f"Head-space of the data: {self.share:.0%} of a step ({figures}). A perfect loader would make this "
            f"training {self.loader_s / self.memory_s:.2f} times as fast: give it more workers, put the data on a "
            "local disk, or decode less for each sample."
        )


class DataHeadSpace(Callback):
    """Measures how much faster a training would be if its batches were always ready. Then it ends the training.

    Some steps get their batches from the loader, and as many get some of these again, from memory: three times each, in
    turns. What is left of a step then is computing, communication and the copy to the device. The data wait of a normal
    run tells less: workers of the loader also take cores away from the training.

    Such a run is a measurement. Its model has seen a few batches many times, so the Trainer must write no checkpoints.
    It ends by itself, on all ranks after the same step; rank 0 prints what it has found, and logs
    `summary/data_head_space` (part of a step, 0 to 1), `summary/loader_step_s` and `summary/memory_step_s`.

    Args:
        steps: optimizer steps that count in each of the six turns; None does nothing.
        batches: how many are kept in memory, on each rank.

    Attributes:
        found: the result, on every rank; None before the end.
    """

    def __init__(self, steps: int | None = 50, batches: int = 8) -> None:
        super().__init__()
        for name, value in (("steps", steps), ("batches", batches)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} measures nothing; give 1 or more, such as {name}=8.")
        self.steps = steps
        self.batches = batches
        self.found: LoaderHeadroom | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        writers = [type(each).__name__ for each in trainer.callbacks if isinstance(each, Checkpoint)]  # type: ignore[attr-defined]
        if stage == "fit" and self.steps and writers:
            raise MisconfigurationException(
                f"DataHeadSpace trains on some batches many times, and {', '.join(writers)} would write checkpoints of "
                "that. Measure with Trainer(enable_checkpointing=False) and without callbacks that write checkpoints."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.steps:
            return
        if isinstance(data_fetcher(trainer), DataLoaderIterDataFetcher):
            raise MisconfigurationException(
                "The training_step of this module reads its batches itself (dataloader_iter), so that DataHeadSpace "
                "cannot give it some of them again. Measure it with a training_step(batch, batch_idx)."
            )
        self.found = None
        self._replay = _ReplayedBatches(self.batches)
        loaders = training_loaders(trainer)
        # The number of batches that the workers have ready at most.
        self._prefetched = max(
            (
                getattr(each, "num_workers", 0) * (getattr(each, "prefetch_factor", None) or 0)
                for each in (loaders.flattened if loaders is not None else ())
            ),
            default=0,
        )
        self._settling = _SETTLING + self._prefetched
        self._turn = self._step = 0
        self._seconds: list[float] = []
        self._counted = (0.0, 0)
        self._last: float | None = None
        turns = 2 * _ROUNDS * (self._settling + self.steps)
        rank_zero_info(f"DataHeadSpace measures for {turns} steps, and then ends this training.")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        fetcher = data_fetcher(trainer) if self.steps else None
        if fetcher is None or fetcher.iterator is None or fetcher.iterator is self._replay:
            return
        self._replay.loader, fetcher.iterator = fetcher.iterator, self._replay  # an epoch begins

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = None  # the time until the next step, in which workers start or a validation runs, does not count

    on_validation_start = on_train_epoch_start

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if not self.steps or self.found is not None or accumulates(trainer):
            return
        self._step += 1
        counts = self._step > self._settling
        is_edge = self._step in (self._settling, self._settling + self.steps)
        if is_edge and trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize(trainer.strategy.root_device)  # so that the clock shows the device's work
        now = time.perf_counter()
        if counts and self._last is not None:
            seconds, steps = self._counted
            self._counted = seconds + now - self._last, steps + 1
        self._last = now
        if self._step == self._settling + self.steps:
            self._end_turn(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.steps and self.found is None:
            rank_zero_warn(
                f"DataHeadSpace has measured {self._turn} of its {2 * _ROUNDS} turns when the training ended, which is "
                f"too few. Let it train for {2 * _ROUNDS * (self._settling + self.steps)} steps or more, or give it "
                f"fewer than steps={self.steps}."
            )

    def _end_turn(self, trainer: Trainer) -> None:
        seconds, steps = self._counted
        self._seconds.append(seconds / steps if steps else float("nan"))
        self._turn += 1
        self._step, self._counted = 0, (0.0, 0)
        self._replay.repeats = self._turn % 2 == 1
        if self._replay.repeats and steps:
            # The workers read ahead until their queues are full, and take no cores from then on.
            time.sleep(min(self._prefetched * seconds / steps, _MOST_WAIT_S))
        if self._turn == 2 * _ROUNDS:
            self._replay.repeats = False
            self.found = LoaderHeadroom(statistics.median(self._seconds[::2]), statistics.median(self._seconds[1::2]))
            rank_zero_info(self.found.text())
            metrics = {
                "summary/data_head_space": self.found.share,
                "summary/loader_step_s": self.found.loader_s,
                "summary/memory_step_s": self.found.memory_s,
            }
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=logged_step(trainer))
            trainer.should_stop = True


class _ReplayedBatches(Iterator[Any]):
    """Stands between the Trainer and its loader. It passes batches on and keeps the last ones, or repeats these."""

    def __init__(self, size: int) -> None:
        self._kept: deque[Any] = deque(maxlen=size)
        self.loader: Iterator[Any] = iter(())
        self.repeats = False

    def __next__(self) -> Any:
        if self.repeats and self._kept:
            self._kept.rotate(-1)
            batch, *place = self._kept[-1]
            # New containers: a training_step may take out of them what it needs.
            return apply_to_collection(batch, Tensor, lambda each: each), *place
        read = next(self.loader)
        self._kept.append((apply_to_collection(read[0], Tensor, lambda each: each), *read[1:]))
        return read
