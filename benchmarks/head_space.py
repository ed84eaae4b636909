"""The step that `DataHeadSpace` measures with batches from memory, beside a run on synthetic data.

    python benchmarks/head_space.py

Each fit trains the same model. Its data set waits for each sample, as for a file on a mount, and is read by workers or
by the training process. The peer's data set is a tensor that is in memory. Both are measured in turns.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, interleave, ratios, save, show, spread
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from azureml_strategy.tracking import DataHeadSpace

NAME = "head_space"
BATCH_SIZE, WIDTH = 128, 768


class Slow(Dataset[torch.Tensor]):
    def __init__(self, samples: int, wait_s: float) -> None:
        self.rows, self.wait_s = torch.randn(samples, WIDTH), wait_s

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.wait_s)
        return self.rows[index]


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = batch[0] if isinstance(batch, list) else batch
        return self.network(rows).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Steps(Callback):
    """Seconds a step, without the first ones."""

    def on_train_start(self, *_: Any) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def step_s(self, first: int) -> float:
        return (self.ends[-1] - self.ends[first]) / (len(self.ends) - 1 - first)


def fit(data: DataLoader[Any], callback: Callback, **options: Any) -> None:
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Model(), data)


def with_head_space(steps: int, wait_s: float, workers: int) -> dict[str, float]:
    callback = DataHeadSpace(steps)
    data = DataLoader(Slow(400 * BATCH_SIZE, wait_s), BATCH_SIZE, num_workers=workers)
    fit(data, callback, max_epochs=-1)
    assert callback.found is not None
    return callback.found._asdict()


def on_synthetic_data(steps: int) -> dict[str, float]:
    callback = Steps()
    data = DataLoader(TensorDataset(torch.randn(64, BATCH_SIZE, WIDTH)), batch_size=None)
    fit(data, callback, max_epochs=-1, max_steps=3 * steps + 10)
    return {"memory_s": callback.step_s(10)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=1, help="rounds before them, which do not count")
    parser.add_argument("--steps", type=int, default=30, help="in each turn")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    names = {"no workers": (0.0005, 0), "two workers": (0.001, 2)}
    cases = {name: partial(with_head_space, options.steps, *case) for name, case in names.items()}
    measured = interleave(
        {"synthetic": partial(on_synthetic_data, options.steps), **cases}, options.rounds, options.warmup
    )
    synthetic = [each["memory_s"] for each in measured["synthetic"]]
    figures: dict[str, Any] = {
        name: {
            "loader_s": spread([each["loader_s"] for each in measured[name]]),
            "memory_s": spread([each["memory_s"] for each in measured[name]]),
            "to_synthetic": ratios([each["memory_s"] for each in measured[name]], synthetic),
        }
        for name in names
    }
    save(
        NAME,
        {"rounds": options.rounds, "steps": options.steps},
        {**figures, "synthetic_s": spread(synthetic), "target": "to_synthetic within 0.97 and 1.03"},
        options.results,
    )
    rows = [
        [name, each["loader_s"].text(1e3), each["memory_s"].text(1e3), each["to_synthetic"].text(digits=3)]
        for name, each in figures.items()
    ]
    rows.append(["synthetic data", "", spread(synthetic).text(1e3), ""])
    show("A step, ms: median (quartiles)", ["data", "loader", "memory", "to synthetic data"], rows)


if __name__ == "__main__":
    main()
