"""What the breakdown of steps, the comparison of ranks and the counters of nodes cost the training thread.

    python benchmarks/breakdown_overhead.py

Two ranks train a tiny model under DDP on gloo, in turns: bare, with our `ThroughputCallback` and `NodeCounters`, with
Lightning's `profiler="simple"` and `DeviceStatsMonitor`, and with TraceML's callback where `traceml-ai` is installed
(alone, without its launcher, which would send what it records; its patches stay in the process). The cost is the
processor time of the training thread over that of the bare run. Of the steps between two windows the middle 80 % count,
so that a step in which the machine did something else does not; a step that ends a window has the cost of the window,
which is shared among its steps. All cases log into a CSV file, so that the cost of a tracking server does not hide it.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
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


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 4)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, labels = batch
        return torch.nn.functional.cross_entropy(self.layer(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Timer(Callback):
    """Notes the processor time of the training thread after each step."""

    def on_train_start(self, *_: Any) -> None:
        self.ends = [time.thread_time()]

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.thread_time())

    def step_s(self) -> float:
        """The usual step, and its part of what a window costs."""
        steps = [end - start for start, end in itertools.pairwise(self.ends)]
        usual = middle([each for number, each in enumerate(steps) if number >= WINDOW and (number + 1) % WINDOW])
        return usual + (middle(steps[2 * WINDOW - 1 :: WINDOW]) - usual) / WINDOW


def middle(values: list[float]) -> float:
    """The mean of the middle 80 %."""
    ordered, left_out = sorted(values), len(values) // 10
    return statistics.fmean(ordered[left_out : len(ordered) - left_out])


def arguments(who: str) -> dict[str, Any]:
    """The Trainer arguments of each case."""
    if who == "bare":
        return {"callbacks": []}
    if who == "ours":
        return {"callbacks": [ThroughputCallback(), NodeCounters()]}
    if who == TRACEML:
        from traceml_ai.integrations import lightning as traceml

        traceml.init()
        return {"callbacks": [traceml.TraceMLCallback()]}
    return {"callbacks": [DeviceStatsMonitor()], "profiler": "simple"}


def fit(who: str, steps: int) -> float:
    """Processor seconds of the training thread in a step."""
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
    return timer.step_s()


def run_rank(options: argparse.Namespace) -> dict[str, list[float]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    os.environ[CALLBACKS_SWITCH] = "off"  # a job would measure the bare training by itself
    cases: dict[str, Callable[[], float]] = {
        who: partial(fit, who, options.steps)
        for who in ("bare", "ours", "simple", *([TRACEML] if find_spec("traceml_ai") else []))
    }
    return interleave(cases, options.rounds)


def figures_of(measured: dict[str, list[float]]) -> Figures:
    added = {who: differences(values, measured["bare"]) for who, values in measured.items() if who != "bare"}
    return {
        "thread_s": {who: spread(values) for who, values in measured.items()},
        "added_s": added,
        "ours_of_50_ms": added["ours"].median / STEP_S,
        "target": {"added_s_at_most": 60e-6, "share_of_50_ms_at_most": 0.0015},
    }


def main() -> None:
    made = parser(__doc__, NAME)
    made.add_argument("--rounds", type=int, default=9)
    made.add_argument("--steps", type=int, default=400, help="in a fit")
    options = made.parse_args()
    figures = run(NAME, options, run_rank, lambda given: run_job(given, figures_of))
    if figures is None:
        return
    rows = [
        [who, figures["thread_s"][who].text(1e6), figures["added_s"][who].text(1e6) if who != "bare" else ""]
        for who in figures["thread_s"]
    ]
    show("Processor time of the training thread in a step, us: median (quartiles)", ["case", "step", "added"], rows)


if __name__ == "__main__":
    main()
