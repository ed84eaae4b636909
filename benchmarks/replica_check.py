"""What `ReplicaCheck` costs the training thread: looks at what ranks must have alike, and at what trains.

    python benchmarks/replica_check.py

Two ranks of an emulated job train a model of 320 tensors with AdamW under `azureml_ddp` for 1,024 steps, in which the
check looks as often as it ever does. All hooks of the callback note their own time, by the clock and in CPU seconds of
the thread. Their sum, divided by the steps, is compared with a step of 50 ms. The model's own steps are shorter, so
that the benchmark is; the check does not depend on them. Rank 0 compares the ranks, and so is the one that is measured.

Each round has two such trainings: with all that the callback does, and with the comparison of ranks alone, which the
target is for; what it does besides, to see whether parameters change, belongs to the first steps.

Reading the CPU time is a system call, of some microseconds on a virtual machine, and more between two steps than in a
loop. What it adds to an empty hook is measured at each step of a fit and taken off the CPU seconds; the clock does not
see it.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import job_harness
import torch
import torch.distributed as dist
from harness import Spread, show, spread
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.cluster.environ import CALLBACKS_SWITCH
from azureml_strategy.strategies.replica_check import ReplicaCheck

STEP_S = 0.05
TARGET = 0.001  # of a step
BATCH_SIZE = 2
LAYERS, WIDTH = 160, 64
HOOKS = (
    *("on_train_start", "on_train_batch_start", "on_before_optimizer_step", "on_train_epoch_end"),
    *("on_save_checkpoint", "on_train_end"),
)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        states = batch[0]
        for layer in self.layers:
            states = states + 0.1 * layer(states)  # so that all of them have gradients worth the name
        return states.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def timed(hook: Callable[..., None], spent: dict[str, list[float]]) -> Callable[..., None]:
    """A hook that notes its own time in `spent`."""

    def run(*arguments: Any) -> None:
        cpu = time.thread_time()
        wall = time.perf_counter()
        hook(*arguments)
        spent["wall"].append(time.perf_counter() - wall)
        spent["cpu"].append(time.thread_time() - cpu)

    return run


class Nothing(Callback):
    """Its hook is timed like those of the check, at each step."""

    def on_train_batch_start(self, *arguments: Any) -> None:
        pass


class Comparing(ReplicaCheck):
    """Compares ranks, and does not watch what changes."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._watch = None


def fit(kind: type[ReplicaCheck], steps: int) -> dict[str, float]:
    """Seconds of a step that the check took, by the clock and of the thread's CPU time, and the longest call."""
    check = kind()
    spent: dict[str, list[float]] = {"wall": [], "cpu": []}
    for name in HOOKS:
        setattr(check, name, timed(getattr(check, name), spent))
    nothing = Nothing()
    timing: dict[str, list[float]] = {"wall": [], "cpu": []}
    setattr(nothing, HOOKS[1], timed(nothing.on_train_batch_start, timing))
    trainer = Trainer(
        strategy="azureml_ddp",
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[check, nothing],
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(steps * BATCH_SIZE, WIDTH)), BATCH_SIZE))
    cpu = sum(spent["cpu"]) - len(spent["cpu"]) * sum(timing["cpu"]) / steps
    return {"wall": sum(spent["wall"]) / steps, "cpu": cpu / steps, "longest": max(spent["wall"])}


KINDS: dict[str, type[ReplicaCheck]] = {"all": ReplicaCheck, "comparison": Comparing}


def run_rank(options: argparse.Namespace) -> Any:
    """All rounds, in one of the two processes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    os.environ[CALLBACKS_SWITCH] = "off"  # the callback is given here, so that it can be timed
    torch.set_num_threads(1)
    measured = [{name: fit(kind, options.steps) for name, kind in KINDS.items()} for _ in range(options.rounds)]
    dist.destroy_process_group()
    return measured


def figures(measured: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """What is added to a step, and its share of one of 50 ms, by the kind of check."""
    found = {name: _figures([each[name] for each in measured]) for name in KINDS}
    share = found["comparison"]["share_of_50_ms"]
    return {**found, "target": {"comparison_at_most": TARGET, "met": max(share.values()) <= TARGET}}


def _figures(measured: list[dict[str, float]]) -> dict[str, Any]:
    per_step = {name: spread([each[name] for each in measured]) for name in ("wall", "cpu")}
    return {
        "s_per_step": per_step,
        "share_of_50_ms": {name: each.median / STEP_S for name, each in per_step.items()},
        "longest_call_s": spread([each["longest"] for each in measured]),
    }


def main() -> None:
    parser = job_harness.parser(__doc__, "replica_check")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1024, help="in each fit")
    found = job_harness.run(
        "replica_check", parser.parse_args(), run_rank, lambda options: job_harness.run_job(options, figures)
    )
    if found is None:
        return
    rows = []
    for kind in KINDS:
        per_step: dict[str, Spread] = found[kind]["s_per_step"]
        for name, each in per_step.items():
            rows.append([kind, name, each.text(1e6), f"{found[kind]['share_of_50_ms'][name]:.3%}"])
        rows.append([kind, "longest call", found[kind]["longest_call_s"].text(1e6), ""])
    show("What the check adds to a step: median (quartiles)", ["what", "time", "us", "of 50 ms"], rows)
    print(f"Target: the comparison takes at most {TARGET:.1%} of 50 ms")


if __name__ == "__main__":
    main()
