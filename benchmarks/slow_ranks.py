"""How often a slow rank is named rightly, with what it is slow at, and how often there is an alarm without cause.

    sudo python benchmarks/slow_ranks.py

Ranks on isolated nodes train under DDP on gloo, over links of the same rate. In each trial, one rank is slowed down so
that a step takes 10 % or 30 % longer: by more computing, by a slower loader, or by a slower link of its node. In other
trials nothing is slowed down. At 30 % the rank must be named while it trains; at 10 % it must be seen in the end.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import subprocess
import time
import warnings
from collections import Counter
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from harness import show, spread
from job_harness import Figures, parser, run, run_job
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from azureml_strategy.strategies import AzureMLDDPStrategy
from azureml_strategy.tracking import ThroughputCallback

NAME = "slow_ranks"
CAUSES = {"compute": "with computing", "data": "with waiting for its data", "link": "with its network link"}
COMPUTE_S, WIDTH, BATCH_SIZE = 0.06, 600, 8
GRADIENT_BITS = 32 * (WIDTH * WIDTH + WIDTH)
NAMED = 0.15  # from this excess on, a rank is named while it trains
MBIT = 400  # of a link, in a second


class Rows(Dataset[torch.Tensor]):
    def __init__(self, samples: int, wait_s: float) -> None:
        self.samples, self.wait_s = samples, wait_s

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.wait_s)
        return torch.ones(WIDTH)


class Model(LightningModule):
    def __init__(self, compute_s: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.compute_s = compute_s

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        matrix, end = torch.ones(64, 64), time.perf_counter() + self.compute_s
        while time.perf_counter() < end:
            torch.mm(matrix, matrix)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "holds up the others" in record.getMessage():
            self.texts.append(record.getMessage())


def shape_link(mbit: float) -> None:
    rate = f"tc qdisc replace dev eth0 root tbf rate {mbit * 1000:.0f}kbit burst 16kb latency 50ms"
    subprocess.run(rate.split(), check=True)


def fit(steps: int, cause: str = "", extra_s: float = 0.0) -> dict[str, Any]:
    """Train with this rank slowed down.

    Args:
        steps: number of them.
        cause: what is slow on this rank; empty for nothing.
        extra_s: by how much, in seconds a step.
    """
    sending_s = GRADIENT_BITS / MBIT / 1e6
    shape_link(MBIT * sending_s / (sending_s + extra_s) if cause == "link" else MBIT)
    told, throughput = Warnings(), ThroughputCallback(minimum_window=5)
    logging.getLogger("azureml_strategy").addHandler(told)
    trainer = Trainer(
        strategy=AzureMLDDPStrategy(),
        max_steps=steps,
        log_every_n_steps=5,
        accelerator="cpu",
        logger=False,
        callbacks=[throughput],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Rows(BATCH_SIZE * trainer.world_size * steps, extra_s / BATCH_SIZE if cause == "data" else 0.0)
    trainer.fit(Model(COMPUTE_S + (extra_s if cause == "compute" else 0.0)), DataLoader(data, BATCH_SIZE))
    logging.getLogger("azureml_strategy").removeHandler(told)
    summary, slowest = throughput.summary(), throughput.slowest_rank()
    assert summary is not None
    seconds = summary.seconds / summary.steps
    return {"step_s": seconds, "named": told.texts, "seen": slowest.text if slowest is not None else ""}


def run_rank(options: argparse.Namespace) -> list[dict[str, Any]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    usual = fit(options.steps)["step_s"]
    cases = [("", 0.0), *((cause, excess) for cause in options.causes for excess in options.excesses)]
    counts = [options.seen_trials if 0 < excess < NAMED else options.trials for _, excess in cases]
    trials = [(case, number % ranks) for case, count in zip(cases, counts, strict=True) for number in range(count)]
    random.Random(0).shuffle(trials)  # alike on all ranks: a drift of the machine meets all cases
    found = []
    for (cause, excess), slow in trials:
        measured = fit(options.steps, cause if slow == rank else "", excess * usual)
        found.append({"cause": cause, "excess": excess, "slow": slow, **measured})
        if rank == 0:
            print({**found[-1], "named": [text[:110] for text in measured["named"]]}, flush=True)
    dist.destroy_process_group()
    return found


def judge(trial: dict[str, Any]) -> str:
    """What the run said: `right`, `wrong` or `nothing`."""
    named = [text.lower() for text in trial["named"]]
    seen = named if not 0 < trial["excess"] < NAMED else [trial["seen"].lower()] * bool(trial["seen"])
    if not seen:
        return "nothing"
    starts, words = f"rank {trial['slow']} (", CAUSES.get(trial["cause"])
    return "right" if words and all(text.startswith(starts) and words in text for text in seen) else "wrong"


def figures_of(found: list[dict[str, Any]]) -> Figures:
    said: dict[str, Counter[str]] = {}
    seconds: dict[str, list[float]] = {}
    for each in found:
        name = f"{each['cause']} {each['excess']:.0%}" if each["cause"] else "undisturbed"
        said.setdefault(name, Counter())[judge(each)] += 1
        seconds.setdefault(name, []).append(each["step_s"])
    return {
        "trials": {name: dict(counts) for name, counts in sorted(said.items())},
        "step_s": {name: spread(values) for name, values in sorted(seconds.items())},
        "target": "right in all trials of a cause, nothing in all undisturbed ones",
    }


def main() -> None:
    made = parser(__doc__, NAME)
    made.add_argument("--trials", type=int, default=30, help="of each case")
    made.add_argument("--seen-trials", type=int, default=10, help="of each case at an excess that is seen only")
    made.add_argument("--steps", type=int, default=50, help="in a trial")
    made.add_argument("--causes", nargs="+", default=list(CAUSES))
    made.add_argument("--excesses", type=float, nargs="+", default=[0.1, 0.3])
    made.add_argument("--bandwidth", help=argparse.SUPPRESS)  # given to the job's processes
    options = made.parse_args()
    figures = run(NAME, options, run_rank, partial(run_job, figures=figures_of, bandwidth=f"{MBIT}mbit"))
    if figures is None:
        return
    if "skipped" in figures:
        raise SystemExit(figures["skipped"])
    rows = [[name, *(str(counts.get(word, 0)) for word in ("right", "wrong", "nothing"))]
            for name, counts in figures["trials"].items()]  # fmt: skip
    show("What was said of the slow rank, in trials", ["slowed down", "right", "wrong", "nothing"], rows)


if __name__ == "__main__":
    main()
