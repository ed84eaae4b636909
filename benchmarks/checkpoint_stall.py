"""What a checkpoint of 400 MB costs a training: ours, Lightning's AsyncCheckpointIO, and torch's async_save.

    python benchmarks/checkpoint_stall.py

One training on one process, in which the competitors take turns, in an order that is drawn for each round: a GPT with
AdamW, 33 million parameters and two states of each. Each has a window of the same number of steps. It is called at the
window's start and writes while the steps go on; what is not written when the last one ends is waited for. One window of
each round has no checkpoint. The cost is how much longer a window takes than that one: the time that the training
thread is in the competitor's hands, and what its writing takes from the steps. Files are removed after the window, and
then an undisturbed step follows, which counts for nothing.

The steps are short, as two windows of the same steps differ the more the longer they are. Before all that, memory is
touched that the competitors will use: a virtual machine is given it page by page, at its first touch, which took 2.8 s
for each GiB here, and would be charged to whoever comes first.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import RESULTS, differences, save, show, spread
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.distributed.checkpoint import async_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.models import GPTConfig, LanguageModel

TARGET = 1.0
OURS, NONE = "JobCheckpoint", "no checkpoint"
WRITER = "checkpoint-writer"


class Stopwatch:
    """Seconds that the training thread spends in a competitor's hands, of each turn."""

    def __init__(self) -> None:
        self.turns: list[float] = []

    def add(self, call: Callable[..., Any], *arguments: Any) -> None:
        started = time.perf_counter()
        call(*arguments)
        self.turns[-1] += time.perf_counter() - started


class Ours(JobCheckpoint):
    """Timed where it saves by itself: between two steps."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, keep_last=2, every_n_epochs=0)  # the one before is removed below
        self.watch = Stopwatch()
        self.begun = 0

    def save(self, trainer: Trainer) -> None:
        """At the end of this step, as if an interval were over."""
        self._due = "interval"

    def on_step_boundary(self, trainer: Trainer) -> None:
        if len(self.watch.turns) > self.begun:
            self.begun += 1
            self.watch.add(super().on_step_boundary, trainer)
            assert self._background.under_way
        else:
            super().on_step_boundary(trainer)

    def done(self) -> bool:
        return not any(thread.name == WRITER for thread in threading.enumerate())

    def wait(self) -> None:
        for thread in threading.enumerate():
            if thread.name == WRITER:
                thread.join()

    def remove(self) -> None:
        (written,) = self._folder.complete()
        self._folder.remove(written.name)


class Nobody:
    """A window without a checkpoint."""

    def __init__(self) -> None:
        self.watch = Stopwatch()

    def save(self, trainer: Trainer) -> None: ...

    def done(self) -> bool:
        return True

    def wait(self) -> None: ...

    def remove(self) -> None: ...


class NotingIO(TorchCheckpointIO):
    """Notes that a checkpoint is written, or could not be: AsyncCheckpointIO raises that when it ends."""

    def __init__(self) -> None:
        self.written = threading.Event()

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        try:
            super().save_checkpoint(*arguments, **options)
        finally:
            self.written.set()


class Lightnings:
    """Lightning's own way to write behind the training."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "lightning.ckpt"
        self.watch = Stopwatch()
        self.writer = NotingIO()
        self.io = AsyncCheckpointIO(self.writer)

    def save(self, trainer: Trainer) -> None:
        self.writer.written.clear()
        usual = trainer.strategy.checkpoint_io
        trainer.strategy.checkpoint_io = self.io
        trainer.save_checkpoint(self.file)
        trainer.strategy.checkpoint_io = usual

    def done(self) -> bool:
        return self.writer.written.is_set()

    def wait(self) -> None:
        self.io.teardown()

    def remove(self) -> None:
        self.file.unlink()


class Torchs:
    """torch.distributed.checkpoint: by default with a copy in new memory, or with a stager that keeps it."""

    def __init__(self, folder: Path, keeps: bool) -> None:
        self.folder = folder / f"torch-{keeps}"
        self.watch = Stopwatch()
        self.stager = DefaultStager(StagingOptions(False, False, False, False)) if keeps else None
        self.future: Future[Any] | None = None

    def save(self, trainer: Trainer) -> None:
        states = [optimizer.state_dict() for optimizer in trainer.optimizers]
        state = {"model": trainer.lightning_module.state_dict(), "optimizers": states}
        self.future = async_save(state, checkpoint_id=self.folder, async_stager=self.stager)

    def done(self) -> bool:
        return self.future is not None and self.future.done()

    def wait(self) -> None:
        assert self.future is not None
        self.future.result()

    def remove(self) -> None:
        shutil.rmtree(self.folder)


class Turns(Callback):
    """Gives each competitor its window, and times it.

    Args:
        competitors: by name.
        steps: of a window.
        seed: of the order.
    """

    def __init__(self, competitors: dict[str, Any], steps: int, seed: int) -> None:
        self.competitors = competitors
        self.steps = steps
        self.draw = random.Random(seed)
        self.order: list[str] = []
        self.windows: dict[str, list[float]] = {name: [] for name in competitors}
        self.written: dict[str, list[int | None]] = {name: [] for name in competitors}
        self.name: str | None = None
        self.started = 0.0

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        # a window, and the step that counts for nothing
        turn, step = divmod(trainer.global_step - self.steps - 1, self.steps + 1)
        if self.name is not None:
            self._look(self.competitors[self.name], step)
        if turn >= 0 and step == 0:
            place = turn % len(self.competitors)
            if place == 0:
                self.order = self.draw.sample(list(self.competitors), len(self.competitors))
            self.name = self.order[place]
            self.started = time.perf_counter()
            self.written[self.name].append(None)
            competitor = self.competitors[self.name]
            competitor.watch.turns.append(0.0)
            competitor.watch.add(competitor.save, trainer)

    def _look(self, competitor: Any, step: int) -> None:
        assert self.name is not None
        if self.written[self.name][-1] is None and competitor.done():
            self.written[self.name][-1] = step
        if step == self.steps:
            competitor.wait()
            self.windows[self.name].append(time.perf_counter() - self.started)
            competitor.remove()
            self.name = None


def train(options: argparse.Namespace, folder: Path, seed: int) -> tuple[Turns, int]:
    """One training; also the bytes of parameters and Adam's states."""
    network = GPTConfig(options.vocabulary, options.length, options.layers, options.width, 8, 4 * options.width)
    module = LanguageModel(network, warmup_steps=4, seed=1)
    others = {
        "AsyncCheckpointIO": Lightnings(folder),
        "async_save": Torchs(folder, False),
        "async_save, stager kept": Torchs(folder, True),
    }
    ours = Ours(folder / "ours")
    turns = Turns({NONE: Nobody(), OURS: ours, **others}, options.window, seed)
    steps = options.window + (options.window + 1) * len(turns.competitors) * (1 + options.rounds)
    tokens = torch.randint(options.vocabulary, (options.batch_size * steps, options.length + 1))
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[turns, ours],
    )
    trainer.fit(module, DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:].clone()), options.batch_size))
    states = (value for state in trainer.optimizers[0].state.values() for value in state.values())
    return turns, sum(each.nbytes for each in (*module.parameters(), *states) if isinstance(each, torch.Tensor))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fits", type=int, default=4, help="each has a first round, which is shown apart")
    parser.add_argument("--rounds", type=int, default=11, help="of each fit, without the first one")
    parser.add_argument("--window", type=int, default=8, help="steps")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=16, help="tokens of a sample")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument(
        "--touched", type=float, default=4.0, help="GiB of memory that are touched before the first fit"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    seed_everything(1, verbose=False)
    np.ones(int(options.touched * 2**30), dtype=np.uint8)
    fits = []
    for number in range(options.fits):
        with tempfile.TemporaryDirectory() as folder:
            turns, state_bytes = train(options, Path(folder), number)
            fits.append(turns)
    figures = {"state_bytes": state_bytes, **evaluate(fits)}
    save("checkpoint_stall", {k: v for k, v in vars(options).items() if k != "results"}, figures, options.results)
    tell(figures)


def evaluate(fits: list[Turns]) -> dict[str, Any]:
    """The figures of all fits together: the later checkpoints, and the first of each fit."""
    names = [name for name in fits[0].competitors if name != NONE]
    stalls = {name: [fit.competitors[name].watch.turns for fit in fits] for name in names}
    costs = {
        name: [
            [window - none for window, none in zip(fit.windows[name], fit.windows[NONE], strict=True)] for fit in fits
        ]
        for name in names
    }
    later = {name: _later(costs[name]) for name in names}
    better = min((name for name in names if name.startswith("async_save")), key=lambda name: spread(later[name]).median)
    return {
        "cost_s": {name: spread(later[name]) for name in names},
        "stall_s": {name: spread(_later(stalls[name])) for name in names},
        "added_to_the_steps_that_follow_s": {name: differences(later[name], _later(stalls[name])) for name in names},
        "first_cost_s": {name: spread([fit[0] for fit in costs[name]]) for name in names},
        "first_stall_s": {name: spread([fit[0] for fit in stalls[name]]) for name in names},
        "written_within_steps": {name: _within([fit.written[name] for fit in fits]) for name in names},
        "better_one": better,
        "ratio_of_median_costs_ours_to": {
            name: spread(later[OURS]).median / spread(later[name]).median for name in names if name != OURS
        },
        "ratios_of_rounds_drawn_again": {
            name: _drawn_again(later[OURS], later[name]) for name in names if name != OURS
        },
        "target": {"ratio_to_the_better_at_most": TARGET},
        "window_without_a_checkpoint_s": spread(_later([fit.windows[NONE] for fit in fits])),
    }


def tell(figures: dict[str, Any]) -> None:
    rows = [
        [
            name,
            figures["cost_s"][name].text(1e3, digits=0),
            "" if name == OURS else _ratio(figures, name),
            figures["stall_s"][name].text(1e3, digits=0),
            figures["added_to_the_steps_that_follow_s"][name].text(1e3, digits=0),
            figures["first_cost_s"][name].text(1e3, digits=0),
            figures["first_stall_s"][name].text(1e3, digits=0),
            figures["written_within_steps"][name],
        ]
        for name in figures["cost_s"]
    ]
    columns = ["ms", "cost", "ours over it", "stall", "added to steps", "first cost", "first stall", "written in steps"]
    show(
        f"A checkpoint of {figures['state_bytes'] / 1e6:,.0f} MB; the better one is {figures['better_one']}",
        columns,
        rows,
    )
    print(f"A window without one takes {figures['window_without_a_checkpoint_s'].text()} s.")


def _ratio(figures: dict[str, Any], name: str) -> str:
    drawn = figures["ratios_of_rounds_drawn_again"][name]
    return f"{figures['ratio_of_median_costs_ours_to'][name]:.2f} ({drawn['low']:.2f} to {drawn['high']:.2f})"


def _drawn_again(ours: list[float], theirs: list[float], times: int = 10_000) -> dict[str, float]:
    """Between what the ratio of medians lies, nine times of ten, when as many rounds are drawn from those measured."""
    chosen = np.random.default_rng(1).integers(len(ours), size=(times, len(ours)))
    ratios = np.median(np.asarray(ours)[chosen], axis=1) / np.median(np.asarray(theirs)[chosen], axis=1)
    low, high = np.quantile(ratios, [0.05, 0.95])
    return {"low": float(low), "high": float(high)}


def _later(fits: list[list[float]]) -> list[float]:
    return [value for fit in fits for value in fit[1:]]


def _within(fits: list[list[int | None]]) -> str:
    """In how many steps it was written; `waited` where the window was too short."""
    found = [step for fit in fits for step in fit]
    steps = [step for step in found if step is not None]
    return f"{min(steps)} to {max(steps)}" if len(steps) == len(found) else f"waited {len(found) - len(steps)} times"


if __name__ == "__main__":
    main()
