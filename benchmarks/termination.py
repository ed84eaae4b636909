"""How long it takes from SIGTERM on one rank until a checkpoint of ResNet-50 is complete on disk.

    python benchmarks/termination.py

Two ranks of an emulated job train ResNet-50 with SGD and momentum on batches so small that a step takes well under a
second. In the sixth step one rank sends itself SIGTERM; the clock stops when the last file of the checkpoint was
written: with `azureml_ddp` and `JobCheckpoint` its manifest, with Lightning's `ddp` and
`ModelCheckpoint(save_on_exception=True)` the checkpoint itself. Each measurement is a job of its own, start to exit.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import job_harness
import torch
from harness import interleave, show, spread
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.cluster.environ import CALLBACKS_SWITCH
from azureml_strategy.emulator import EmulatedJob, emulate
from azureml_strategy.models import Bottleneck, ResNet50

TARGET_S = 5.0
SIGNALLED_STEP = 5
CASES = {"azureml_ddp, rank 1 told": 1, "azureml_ddp, rank 0 told": 0, "ddp, rank 1 told": 1, "ddp, rank 0 told": 0}


class SmallResNet(nn.Module):
    """One bottleneck and a classifier, for a smoke test."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Bottleneck(3, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1000))

    def forward(self, images: Tensor) -> Tensor:
        return self.blocks(images)


class Noise(Dataset[tuple[Tensor, Tensor]]):
    """Images of nothing, without end for this purpose."""

    def __init__(self, pixels: int) -> None:
        self.pixels = pixels

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(3, self.pixels, self.pixels), torch.tensor(index % 1000)


class Classifier(LightningModule):
    def __init__(self, small: bool) -> None:
        super().__init__()
        self.network = SmallResNet() if small else ResNet50()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Signal(Callback):
    """Sends SIGTERM to this process in a step, and notes when, and how long steps take."""

    def __init__(self, rank: int, notes: Path) -> None:
        self.rank = rank
        self.notes = notes
        self.moments: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.moments.append(time.time())
        if batch_idx == SIGNALLED_STEP and trainer.global_rank == self.rank:
            steps = [end - start for start, end in pairwise(self.moments)]
            self.notes.write_text(json.dumps({"told_at": time.time(), "step_s": statistics.median(steps[1:])}))
            os.kill(os.getpid(), signal.SIGTERM)


def train(options: argparse.Namespace) -> None:
    """One rank of one job."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    folder = Path(options.folder)
    ours = options.case.startswith("azureml")
    saver: Checkpoint = JobCheckpoint(folder) if ours else ModelCheckpoint(folder, save_on_exception=True)
    if not ours:
        os.environ[CALLBACKS_SWITCH] = "off"
    torch.manual_seed(0)
    trainer = Trainer(
        strategy=options.case.partition(",")[0],
        num_nodes=2,
        devices=1,
        accelerator="cpu",
        max_epochs=1,
        max_steps=100,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Signal(CASES[options.case], folder / "notes.json"), saver],
    )
    trainer.fit(Classifier(options.smoke), DataLoader(Noise(options.pixels), options.batch_size))


def terminate(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """One job; the seconds are None where it saved nothing."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.abspath(__file__), "--case", case, "--folder", folder]
        command += ["--pixels", str(options.pixels), "--batch-size", str(options.batch_size)]
        code = emulate(EmulatedJob([*command, *["--smoke"] * options.smoke], nodes=2))
        notes = json.loads((Path(folder) / "notes.json").read_text())
        last = "*.manifest.json" if case.startswith("azureml") else "*.ckpt"
        saved = [path.stat().st_mtime for path in Path(folder).glob(last)]
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    seconds = max(saved) - notes["told_at"] if saved else None
    return {"saved_after_s": seconds, "step_s": notes["step_s"], "exit_code": code, "bytes": size}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    jobs = {case: partial(terminate, case, options) for case in options.cases}
    measured = interleave(jobs, options.rounds, options.warmup)
    found = {case: figures(rounds) for case, rounds in measured.items()}
    ours = [found[case]["saved_after_s"] for case in options.cases if case.startswith("azureml")]
    met = all(each is not None and each.high <= TARGET_S for each in ours)
    return {"jobs": found, "target": {"seconds_at_most": TARGET_S, "met": met}}


def figures(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    saved = [each["saved_after_s"] for each in rounds if each["saved_after_s"] is not None]
    return {
        "saved_after_s": spread(saved) if saved else None,
        "jobs_that_saved": len(saved),
        "jobs": len(rounds),
        "step_s": spread([each["step_s"] for each in rounds]),
        "exit_codes": [each["exit_code"] for each in rounds],
        "bytes": max(each["bytes"] for each in rounds),
    }


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            case,
            each["saved_after_s"].text(digits=2) if each["saved_after_s"] else "nothing",
            f"{each['jobs_that_saved']} of {each['jobs']}",
            each["step_s"].text(1e3, digits=0),
            ", ".join(map(str, each["exit_codes"])),
        ]
        for case, each in found.items()
    ]


def parse() -> argparse.Namespace:
    parser = job_harness.parser(__doc__, "termination")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--pixels", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=2, help="images a step and rank")
    parser.add_argument("--smoke", action="store_true", help="a tiny network, to see that it works")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)  # given to the jobs' processes
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.case:
        train(options)
        return
    found = job_harness.run("termination", options, train, measure)
    assert found is not None
    columns = ["strategy", "saved after, s", "jobs that saved", "step, ms", "exit codes"]
    show("From SIGTERM to saved, ResNet-50: median (quartiles)", columns, rows(found["jobs"]))
    print(f"Target: {TARGET_S:.0f} s")


if __name__ == "__main__":
    main()
