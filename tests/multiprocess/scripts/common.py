"""A small model, real data of its own, and a way to tell the test what happened."""

from __future__ import annotations

import gc
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SAMPLES, FEATURES = 64, 8


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """64 rows from one seed, with their index, so that a test can see who read what."""

    def __init__(self) -> None:
        self.rows = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], torch.tensor(index)


class Regression(LightningModule):
    """Two layers that learn the sum of a row; records losses and the rows read."""

    def __init__(self, learning_rate: float = 0.05, unused: bool = False, batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle: nn.Module = nn.BatchNorm1d(16) if batch_norm else nn.Tanh()
        self.network = nn.Sequential(nn.Linear(FEATURES, 16), middle, nn.Linear(16, 1))
        self.unused = nn.Linear(1, 1) if unused else None
        self.learning_rate = learning_rate
        self.losses: list[float] = []
        self.read: list[int] = []

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        rows, indices = batch
        self.read += indices.tolist()
        return (self.network(rows).squeeze(1) - rows.sum(dim=1)).pow(2).mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.network(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


class Losses(Callback):
    """Notes this rank's loss of each batch, outside of the step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))


class MeanLosses(Losses):
    """Notes the mean of what the ranks have logged as `train/loss`."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        mean = trainer.strategy.reduce(trainer.callback_metrics["train/loss"].clone(), reduce_op="mean")
        self.losses.append(float(mean))


def loader(batch_size: int = 8, shuffle: bool = False) -> DataLoader[tuple[Tensor, Tensor]]:
    return DataLoader(Rows(), batch_size=batch_size, shuffle=shuffle)


def quiet_trainer(**arguments: Any) -> Trainer:
    quiet = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**quiet, **arguments})


def parameters(module: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


def live_bytes() -> int:
    """Bytes of all tensors there are, each storage once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor):
            with suppress(NotImplementedError):  # an undefined tensor, as autograd has them, lies nowhere
                storage = each.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def report(rank: int, **values: Any) -> None:
    """Write what the test compares; complete or not there at all."""
    folder = Path(os.environ["RESULTS"])
    folder.mkdir(exist_ok=True)
    part = folder / f"{rank}.{os.getpid()}.part"
    part.write_text(json.dumps(values))
    part.rename(folder / f"{rank}.json")
