"""How long a checkpoint of 400 MB keeps the training: ours, Lightning's AsyncCheckpointIO, and torch's async_save.

    python benchmarks/checkpoint_stall.py

One training on one process, in which the competitors take turns: a GPT with AdamW, 33 million parameters and two
states of each. What counts is how long the training thread is in a competitor's hands, from the call until training
can go on, and, where it is called again before the optimizer's step, in these calls as well. Each then has the time of
one step to write, is waited for outside of what is timed, and an undisturbed step follows.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, differences, ratios, save, show, spread
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.checkpoint import async_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.models import GPTConfig, LanguageModel

TARGET = 0.2
OURS = "JobCheckpoint"
# A competitor's turn, the step in which it writes, and a step that nobody disturbs.
_STEPS_EACH = 2


class Stopwatch:
    """Seconds that the training thread spends in a competitor's hands, of each turn."""

    def __init__(self) -> None:
        self.turns: list[float] = []

    def add(self, call: Callable[..., Any], *arguments: Any) -> None:
        started = time.perf_counter()
        call(*arguments)
        self.turns[-1] += time.perf_counter() - started


class Ours(JobCheckpoint):
    """Timed wherever Lightning calls it between two optimizer steps."""

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(folder, keep_last=1, every_n_train_steps=every, every_n_epochs=0)
        self.watch = Stopwatch()
        self.every = every

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step % self.every == 0:
            self.watch.turns.append(0.0)
            self.watch.add(super().on_train_batch_end, trainer, *rest)
        else:
            super().on_train_batch_end(trainer, *rest)

    def on_after_backward(self, *arguments: Any) -> None:
        if self.watch.turns:
            self.watch.add(super().on_after_backward, *arguments)

    def on_before_optimizer_step(self, *arguments: Any) -> None:
        if self.watch.turns:
            self.watch.add(super().on_before_optimizer_step, *arguments)

    def wait(self) -> None:
        while any(thread.name == "checkpoint-writer" for thread in threading.enumerate()):
            time.sleep(0.01)


class Lightnings:
    """Lightning's own way to write behind the training."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "lightning.ckpt"
        self.watch = Stopwatch()
        self.io = AsyncCheckpointIO()

    def save(self, trainer: Trainer) -> None:
        usual = trainer.strategy.checkpoint_io
        self.io.checkpoint_io = self.io.checkpoint_io or usual
        trainer.strategy.checkpoint_io = self.io
        trainer.save_checkpoint(self.file)
        trainer.strategy.checkpoint_io = usual

    def wait(self) -> None:
        self.io.teardown()
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

    def wait(self) -> None:
        assert self.future is not None
        self.future.result()
        shutil.rmtree(self.folder)


class Turns(Callback):
    """Gives each competitor its turn, and times the steps: those in which one writes, and those in which none does."""

    def __init__(self, ours: Ours, others: dict[str, Any]) -> None:
        self.competitors = {OURS: ours, **others}
        self.steps: dict[str, list[float]] = {name: [] for name in self.competitors}
        self.undisturbed: list[float] = []
        self.writing: str | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % _STEPS_EACH == 1 and self.writing is not None:
            self.competitors[self.writing].wait()
            self.writing = None
        self.started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        taken = time.perf_counter() - self.started
        if self.writing is not None:
            self.steps[self.writing].append(taken)
        elif trainer.global_step > _STEPS_EACH:
            self.undisturbed.append(taken)
        turn, rest = divmod(trainer.global_step, _STEPS_EACH)
        if rest == 0:
            self.writing = list(self.competitors)[turn % len(self.competitors)]
            competitor = self.competitors[self.writing]
            if competitor is not self.competitors[OURS]:  # which is a callback itself
                competitor.watch.turns.append(0.0)
                competitor.watch.add(competitor.save, trainer)


def train(options: argparse.Namespace, folder: Path) -> tuple[Turns, int]:
    """One training; the bytes of its parameters and the optimizer's states as well."""
    network = GPTConfig(options.vocabulary, options.length, options.layers, options.width, 8, 4 * options.width)
    module = LanguageModel(network, warmup_steps=4, seed=1)
    kept, fresh = "async_save, stager kept", "async_save"
    others = {"AsyncCheckpointIO": Lightnings(folder), fresh: Torchs(folder, False), kept: Torchs(folder, True)}
    every = _STEPS_EACH * (1 + len(others))
    turns = Turns(Ours(folder / "ours", every), others)
    steps = every * (options.rounds + 2) + 1
    tokens = torch.randint(options.vocabulary, (options.batch_size * steps, options.length + 1))
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[turns, turns.competitors[OURS]],
    )
    trainer.fit(module, DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:].clone()), options.batch_size))
    states = (value for state in trainer.optimizers[0].state.values() for value in state.values())
    return turns, sum(each.nbytes for each in (*module.parameters(), *states) if isinstance(each, torch.Tensor))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    seed_everything(1, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        turns, state_bytes = train(options, Path(folder))
    # the first turn finds cold memory; ours compares in its second what it takes for granted from then on
    stalls = {name: each.watch.turns[1 : 1 + options.rounds] for name, each in turns.competitors.items()}
    written = {name: turns.steps[name][1 : 1 + options.rounds] for name in turns.competitors}
    better = min((name for name in stalls if name != OURS), key=lambda name: spread(stalls[name]).median)
    undisturbed = spread(turns.undisturbed)
    figures = {
        "state_bytes": state_bytes,
        "stall_s": {name: spread(values) for name, values in stalls.items()},
        "first_stall_s": {name: each.watch.turns[0] for name, each in turns.competitors.items()},
        "ratio_ours_to": {name: ratios(stalls[OURS], stalls[name]) for name in stalls if name != OURS},
        "better_one": better,
        "target": {"ratio_to_the_better_at_most": TARGET},
        "undisturbed_step_s": undisturbed,
        "added_to_the_step_that_follows_s": {
            name: differences(values, [undisturbed.median] * len(values)) for name, values in written.items()
        },
    }
    save("checkpoint_stall", {k: v for k, v in vars(options).items() if k != "results"}, figures, options.results)
    rows = [
        [
            name,
            spread(stalls[name]).text(1e3),
            f"{1e3 * figures['first_stall_s'][name]:,.1f}",
            "" if name == OURS else figures["ratio_ours_to"][name].text(digits=3),
            figures["added_to_the_step_that_follows_s"][name].text(1e3),
        ]
        for name in stalls
    ]
    columns = ["", "stall, ms", "first, ms", "ours over it", "added to the next step, ms"]
    show(f"A checkpoint of {state_bytes / 1e6:,.0f} MB; the better one is {better}", columns, rows)
    print(f"An undisturbed step takes {undisturbed.text(1e3)} ms.")


if __name__ == "__main__":
    main()
