"""What tracking adds to a training step: ours, Lightning's own, and none, in real `Trainer` fits on SQLite.

    python benchmarks/tracking_overhead.py

A tiny model shows the cost most sharply: steps follow each other as fast as Lightning runs them. The second kind of
step sleeps for 50 ms, as the host does while a GPU works. The steps are timed from the end of the set-up to the last
one; what follows until `fit` returns, when everything is written, is the end of the run and given a fit.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

import torch
from harness import RESULTS, differences, interleave, ratios, save, show, spread
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import MLFlowLogger
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.tracking import JobMLFlowLogger, ThroughputCallback

BATCH_SIZE = 16
STEP_S = 0.05  # the step that the cost is compared with


class Model(LightningModule):
    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 4)
        self.sleep_s = sleep_s
        self.flops_per_batch = 1  # ThroughputMonitor warns without it

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        inputs, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layer(inputs), labels)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Timer(Callback):
    def on_train_start(self, *_: Any) -> None:
        self.started = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        self.ended = time.perf_counter()


def tracked_by(who: str, store: str) -> dict[str, Any]:
    """The Trainer arguments of each competitor."""
    if who == "ours":
        return {"logger": JobMLFlowLogger(tracking_uri=store), "callbacks": [ThroughputCallback()]}
    if who == "lightning":
        monitor = ThroughputMonitor(batch_size_fn=lambda batch: batch[0].size(0))
        return {"logger": MLFlowLogger(tracking_uri=store), "callbacks": [monitor]}
    return {"logger": False, "callbacks": []}


def time_fit(who: str, every: int, steps: int, sleep_s: float, store: str) -> tuple[float, float]:
    """Seconds of a step, and of the end of the run, in one fit."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(steps * BATCH_SIZE, 32), torch.randint(0, 4, (steps * BATCH_SIZE,)))
    tracking, timer = tracked_by(who, store), Timer()
    trainer = Trainer(
        max_epochs=1,
        log_every_n_steps=every,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=tracking["logger"],
        callbacks=[*tracking["callbacks"], timer],
    )
    trainer.fit(Model(sleep_s), DataLoader(data, BATCH_SIZE))
    returned = time.perf_counter()
    return (timer.ended - timer.started) / steps, returned - timer.ended


def compare(fit: Callable[..., tuple[float, float]], rounds: int) -> dict[str, Any]:
    """Time per step with ours, with Lightning's and with none, and what the first two add."""
    cases = {who: partial(fit, who) for who in ("none", "lightning", "ours")}
    measured = interleave(cases, rounds)
    per_step = {who: [step for step, _ in values] for who, values in measured.items()}
    ours, theirs = (differences(per_step[who], per_step["none"]) for who in ("ours", "lightning"))
    return {
        "step_s": {who: spread(values) for who, values in per_step.items()},
        "added_s": {"ours": ours, "lightning": theirs},
        "step_ratio_ours_to_lightning": ratios(per_step["ours"], per_step["lightning"]),
        "end_of_run_s": {who: spread([end for _, end in values]) for who, values in measured.items()},
        "added_share_of_50_ms": {"ours": ours.median / STEP_S, "lightning": theirs.median / STEP_S},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=400, help="of the tiny model, in a fit")
    parser.add_argument("--sleeping-steps", type=int, default=60, help="of 50 ms, in a fit")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write tracking_overhead.json into")
    options = parser.parse_args()
    results = options.results.resolve()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        store = f"sqlite:///{Path(folder) / 'mlflow.db'}"
        for kind, steps, sleep_s in (("tiny", options.steps, 0.0), ("50 ms", options.sleeping_steps, STEP_S)):
            for every in (1, 50):
                fit = partial(time_fit, every=every, steps=steps, sleep_s=sleep_s, store=store)
                figures[f"{kind} step, log every {every}"] = compare(fit, options.rounds)
    settings = {name: value for name, value in vars(options).items() if name != "results"}
    save("tracking_overhead", settings, figures, results)
    rows = [
        [
            name,
            figure["step_s"]["none"].text(1e6),
            figure["added_s"]["lightning"].text(1e6),
            figure["added_s"]["ours"].text(1e6),
            f"{figure['added_share_of_50_ms']['ours']:.2%}",
            figure["end_of_run_s"]["lightning"].text(1e3),
            figure["end_of_run_s"]["ours"].text(1e3),
        ]
        for name, figure in figures.items()
    ]
    columns = ["case", "bare step, us", "Lightning adds", "ours adds", "of 50 ms", "Lightning's end, ms", "our end, ms"]
    show("Time that tracking adds to a step: median (quartiles)", columns, rows)


if __name__ == "__main__":
    main()
