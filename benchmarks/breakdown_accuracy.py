"""The breakdown of steps beside torch.profiler's and that of DDP's own reducer, on the same steps.

    sudo python benchmarks/breakdown_accuracy.py

Two ranks on isolated nodes train under DDP on gloo, over links of several rates. In each fit, `ThroughputCallback`
tells the parts of the steps; torch.profiler records the same steps, and the reducer times its communication. From the
trace, exposed communication is the time in which a collective runs and no operator of the training thread does.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from harness import interleave, show, spread
from job_harness import Figures, parser, run, run_job
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.profiling.trace_summary import Intervals, intersect, subtract, total, union
from azureml_strategy.strategies import AzureMLDDPStrategy
from azureml_strategy.tracking import ThroughputCallback
from azureml_strategy.tracking.timing.meters import STEP_PARTS
from azureml_strategy.tracking.timing.steps import Step
from azureml_strategy.tracking.timing.summary import Totals

NAME = "breakdown_accuracy"
WIDTH, DEPTH, BATCH_SIZE = 768, 8, 192
FIRST, LAST = 10, 29  # the steps that are compared
PARTS = ("data_wait", "copy", "forward", "backward", "communication", "optimizer", "other")


class Wide(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
        self.network = nn.Sequential(*layers)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.network(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Spans(Profiler):
    """Marks in torch's trace what Lightning does."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[str, Any] = {}

    def start(self, action_name: str) -> None:
        self._open[action_name] = record_function(f"span:{action_name}")
        self._open[action_name].__enter__()

    def stop(self, action_name: str) -> None:
        self._open.pop(action_name).__exit__(None, None, None)


class Traced(Callback):
    """Records the steps by torch.profiler, and what the reducer says of each."""

    def __init__(self) -> None:
        self.exposed_s: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.model._set_ddp_runtime_logging_sample_rate(1)
        self.profile = profile(activities=[ProfilerActivity.CPU])
        self.profile.start()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        with record_function("step_ends"):
            # DDP tells of a step in the next one.
            told = trainer.strategy.model._get_ddp_logging_data()
        exposed_ns = told.get("backward_comm_time", 0) - told.get("backward_compute_comm_overlap_time", 0)
        self.exposed_s.append(exposed_ns / 1e9)

    def on_train_end(self, *_: Any) -> None:
        self.profile.stop()


def part_of(action: str) -> str:
    """The part that a span of Lightning's belongs to."""
    owner, _, hook = action.rpartition(".")
    if hook in ("train_dataloader_next", "optimizer_step"):
        return {"train_dataloader_next": "data_wait", "optimizer_step": "optimizer"}[hook]
    names = {"batch_to_device": "copy", "training_step": "forward", "backward": "backward"}
    return names.get(hook, "other") if owner.startswith("[Strategy]") else "other"


def parts_of(trace: dict[str, Any]) -> dict[str, float]:
    """Seconds of each part in the compared steps, from torch's trace."""
    events = [each for each in trace["traceEvents"] if each.get("ph") == "X"]
    marks = sorted((each for each in events if each["name"] == "step_ends"), key=lambda each: each["ts"])
    thread = marks[0]["tid"]
    ends = [each["ts"] + each["dur"] for each in marks]
    window = union([(ends[FIRST - 1], ends[LAST])])

    def span(each: dict[str, Any]) -> tuple[float, float]:
        return each["ts"], each["ts"] + each["dur"]

    spans = [each for each in events if each["name"].startswith("span:") and each["tid"] == thread]
    exclusive: dict[str, Intervals] = defaultdict(list)
    open_ones: list[dict[str, Any]] = []
    for each in sorted(spans, key=lambda one: (one["ts"], -one["dur"])):
        while open_ones and span(open_ones[-1])[1] <= each["ts"]:
            open_ones.pop()
        part = part_of(each["name"].removeprefix("span:"))
        for outer in open_ones:
            name = part_of(outer["name"].removeprefix("span:"))
            exclusive[name] = subtract(exclusive[name], union([span(each)]))
        exclusive[part] = union([*exclusive[part], span(each)])
        open_ones.append(each)
    sent = union(span(each) for each in events if each["name"].startswith("gloo:"))
    computed = union(
        span(each)
        for each in events
        if each.get("cat") == "cpu_op" and each["tid"] == thread and each["name"].startswith("aten::")
    )
    exposed = subtract(sent, computed)
    seconds = dict.fromkeys(PARTS, 0.0)
    for name in PARTS:
        own = intersect(exclusive[name], window)
        waited = intersect(own, exposed) if name in ("forward", "backward", "optimizer") else []
        seconds[name] += total(subtract(own, waited)) / 1e6
        seconds["communication"] += total(waited) / 1e6
    seconds["other"] += total(window) / 1e6 - sum(seconds.values())
    return seconds


class Kept(ThroughputCallback):
    """Keeps the parts of each step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.parts: list[list[float]] = []

    def _account(self, trainer: Trainer, steps: list[Step]) -> Totals:
        self.parts.extend([each.parts[part] for part in STEP_PARTS] for each in steps)
        return super()._account(trainer, steps)


def fit() -> dict[str, Any]:
    data = TensorDataset(torch.randn(2 * BATCH_SIZE * (LAST + 3), WIDTH))
    throughput, traced = Kept(warmup_steps=0), Traced()
    trainer = Trainer(
        strategy=AzureMLDDPStrategy(bucket_cap_mb=4),
        max_steps=LAST + 2,
        log_every_n_steps=FIRST,
        accelerator="cpu",
        logger=False,
        profiler=Spans(),
        callbacks=[throughput, traced],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Wide(), DataLoader(data, BATCH_SIZE))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        traced.profile.export_chrome_trace(str(path))
        by_torch = parts_of(json.loads(path.read_text()))
    ours = [sum(each) for each in zip(*throughput.parts[FIRST : LAST + 1], strict=True)]
    whole = sum(ours)
    return {
        "step_s": whole / (LAST - FIRST + 1),
        "ours": {part.label: ours[part] / whole for part in STEP_PARTS if part.label in PARTS},
        "torch.profiler": {name: value / sum(by_torch.values()) for name, value in by_torch.items()},
        "reducer": sum(traced.exposed_s[FIRST + 1 : LAST + 2]) / whole,
    }


def run_rank(options: argparse.Namespace) -> list[dict[str, Any]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    found = interleave({"fit": fit}, options.rounds, options.warmup)["fit"]
    dist.destroy_process_group()
    return found


def figures_of(found: list[dict[str, Any]]) -> Figures:
    def points(name: str, part: str) -> list[float]:
        return [100 * (each["ours"][part] - each[name][part]) for each in found]

    return {
        "step_s": spread([each["step_s"] for each in found]),
        "share": {part: spread([each["ours"][part] for each in found]) for part in PARTS},
        "points_from_torch.profiler": {part: spread(points("torch.profiler", part)) for part in PARTS},
        "points_from_reducer": spread([100 * (each["ours"]["communication"] - each["reducer"]) for each in found]),
        "largest_points_from_torch.profiler": max(
            abs(value) for part in PARTS for value in points("torch.profiler", part)
        ),
    }


def measure(options: argparse.Namespace) -> Figures:
    return {rate: run_job(options, figures_of, bandwidth=rate) for rate in options.rates} | {
        "target": "each part within 5 points of torch.profiler's; more exposed communication over slower links"
    }


def main() -> None:
    made = parser(__doc__, NAME)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--warmup", type=int, default=1, help="rounds before them, which do not count")
    made.add_argument("--rates", nargs="+", default=["10gbit", "1gbit", "500mbit"])
    made.add_argument("--bandwidth", help=argparse.SUPPRESS)  # given to the job's processes
    options = made.parse_args()
    figures = run(NAME, options, run_rank, measure)
    if figures is None:
        return
    for rate in options.rates:
        if "skipped" in figures[rate]:
            raise SystemExit(figures[rate]["skipped"])
        rows = [
            [part, figures[rate]["share"][part].text(100), figures[rate]["points_from_torch.profiler"][part].text()]
            for part in PARTS
        ]
        rows.append(["communication, by the reducer", "", figures[rate]["points_from_reducer"].text()])
        show(f"Links of {rate}: median (quartiles)", ["part", "share, %", "points from torch.profiler's"], rows)


if __name__ == "__main__":
    main()
