"""What the breakdown of steps, the comparison of ranks and the counters of nodes cost the training thread.

    python benchmarks/breakdown_overhead.py

One rank, and then two, train a tiny model under DDP on gloo, in turns: bare, bare once more, with two callbacks that do
nothing, with our `ThroughputCallback` and `NodeCounters`, with Lightning's `profiler="simple"` and
`DeviceStatsMonitor`, and with TraceML's callback where `traceml-ai` is installed (alone, without its launcher, which
would send what it records; its patches stay in the process). The cost is the processor time of the training thread over
that of the bare run.

One training differs from the next of the same kind by more than what is measured here. So the steps of all trainings of
a kind are taken together, and their lower quartile is compared: steps that the machine left alone. What the second bare
training adds tells how far such a figure can be off: little with one rank, much with two, which wait for each other. A
step that ends a window has the cost of the window, which is shared among its steps. All cases log into a CSV file, so
that the cost of a tracking server does not hide it.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from harness import differences, interleave, show, spread
from job_harness import Figures, parser, run, run_job
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.cluster.environ import CALLBACKS_SWITCH
from azureml_strategy.strategies import AzureMLDDPStrategy
from azureml_strategy.tracking import NodeCounters, ThroughputCallback

BATCH_SIZE = 16
WINDOW = 50
TRACEML = "traceml"
STEP_S = 0.05  # the step that the cost is compared with
NAME = "breakdown_overhead"
CASES = ("bare", "bare again", "idle callbacks", "ours", "simple")

# Of one training: seconds of the usual steps, and of those that end a window.
Steps = tuple[list[float], list[float]]


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 4)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, labels = batch
        return torch.nn.functional.cross_entropy(self.layer(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Idle(Callback):
    """Does nothing. Lightning still opens a span for each of its hooks."""


class IdleToo(Callback):
    """Does nothing, under another name."""


class Timer(Callback):
    """Notes the processor time of the training thread after each step."""

    def on_train_start(self, *_: Any) -> None:
        self.ends = [time.thread_time()]

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.thread_time())

    def steps(self) -> Steps:
        """The usual steps, and those that end a window; without the first window."""
        steps = [end - start for start, end in itertools.pairwise(self.ends)]
        usual = [each for number, each in enumerate(steps) if number >= WINDOW and (number + 1) % WINDOW]
        return usual, steps[2 * WINDOW - 1 :: WINDOW]


def step_s(trainings: Sequence[Steps]) -> float:
    """Seconds of a step in some trainings, with its part of what a window costs."""
    usual = spread(list(itertools.chain.from_iterable(steps for steps, _ in trainings)))
    windows = spread(list(itertools.chain.from_iterable(ends for _, ends in trainings)))
    return usual.low + (windows.median - usual.median) / WINDOW


def arguments(who: str) -> dict[str, Any]:
    """The Trainer arguments of each case."""
    if who.startswith("bare"):
        return {"callbacks": []}
    if who == "idle callbacks":
        return {"callbacks": [Idle(), IdleToo()]}
    if who == "ours":
        return {"callbacks": [ThroughputCallback(), NodeCounters()]}
    if who == TRACEML:
        from traceml_ai.integrations import lightning as traceml

        traceml.init()
        return {"callbacks": [traceml.TraceMLCallback()]}
    return {"callbacks": [DeviceStatsMonitor()], "profiler": "simple"}


def fit(who: str, steps: int) -> Steps:
    """Processor seconds of the training thread in the steps of a training."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(2 * steps * BATCH_SIZE, 32), torch.randint(0, 4, (2 * steps * BATCH_SIZE,)))
    timer = Timer()
    with tempfile.TemporaryDirectory() as folder:
        chosen = arguments(who)
        trainer = Trainer(
            strategy=AzureMLDDPStrategy(),
            max_epochs=1,
            log_every_n_steps=WINDOW,
            logger=CSVLogger(folder),
            accelerator="cpu",
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{**chosen, "callbacks": [*chosen["callbacks"], timer]},
        )
        trainer.fit(Model(), DataLoader(data, BATCH_SIZE))
    return timer.steps()


def run_rank(options: argparse.Namespace) -> dict[str, list[Steps]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    os.environ[CALLBACKS_SWITCH] = "off"  # a job would measure the bare training by itself
    cases: dict[str, Callable[[], Steps]] = {
        who: partial(fit, who, options.steps) for who in (*CASES, *([TRACEML] if find_spec("traceml_ai") else []))
    }
    measured = interleave(cases, options.rounds, options.warmup)
    dist.destroy_process_group()
    return measured


def figures_of(measured: dict[str, list[Steps]]) -> Figures:
    together = {who: step_s(trainings) for who, trainings in measured.items()}
    each = {who: [step_s([training]) for training in trainings] for who, trainings in measured.items()}
    added = {who: seconds - together["bare"] for who, seconds in together.items()}
    return {
        "step_s": together,
        "added_s": added,
        "added_by_round_s": {who: differences(values, each["bare"]) for who, values in each.items() if who != "bare"},
        "ours_of_50_ms": added["ours"] / STEP_S,
        "target": {"added_s_at_most": 60e-6, "share_of_50_ms_at_most": 0.0015},
    }


def measure(options: argparse.Namespace) -> Figures:
    return {"1 rank": run_job(options, figures_of, nodes=1), "2 ranks": run_job(options, figures_of)}


def main() -> None:
    made = parser(__doc__, NAME)
    made.add_argument("--rounds", type=int, default=20)
    made.add_argument("--warmup", type=int, default=1, help="rounds before them, which do not count")
    made.add_argument("--steps", type=int, default=200, help="in a fit")
    options = made.parse_args()
    figures = run(NAME, options, run_rank, measure)
    if figures is None:
        return
    for ranks, found in figures.items():
        by_round = found["added_by_round_s"]
        rows = [
            [who, f"{seconds * 1e6:,.0f}", f"{found['added_s'][who] * 1e6:,.0f}", by_round[who].text(1e6, 0)]
            for who, seconds in found["step_s"].items()
            if who != "bare"
        ]
        bare = f"{found['step_s']['bare'] * 1e6:,.0f}"
        title = f"Processor time of the training thread of {ranks}, in us a step; bare: {bare}"
        show(title, ["case", "step", "added", "of a round: median (quartiles)"], rows)


if __name__ == "__main__":
    main()
