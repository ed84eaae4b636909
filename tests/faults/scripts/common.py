"""What the scripts share: a table of numbers, a network with tensors of more than 64 KiB, and what a script gives."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from azureml_strategy.data import ResumableLoader, ResumableSampler

# 144 x 144 float32 are 81 KiB.
FEATURES, HIDDEN, CLASSES = 16, 144, 5
BATCH, BATCHES = 4, 15
VALIDATION_ROWS = 24


@dataclass
class Training:
    """What a script hands to its Trainer.

    Attributes:
        module: what learns.
        train: the loader of it, or loaders, or a data module that has them.
        validate: the same; None for no validation, or where the data module has it.
        arguments: the Trainer's.
        callbacks: the Trainer's.
        monitor: what the checkpoints are ranked by; None where nothing is validated.
        every_n_train_steps: optimizer steps between two checkpoints.
        kept: what else must be as in the undisturbed run when `fit` returns: tensors and numbers by name, nested.
        strategy: further arguments of the DDP strategy.
    """

    module: LightningModule
    train: Any
    validate: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Callback] = field(default_factory=list)
    monitor: str | None = "val_loss"
    every_n_train_steps: int = 2
    kept: Callable[[], dict[str, Any]] = dict
    strategy: dict[str, Any] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """The arguments of `Trainer.fit`."""
        if isinstance(self.train, LightningDataModule):
            return {"datamodule": self.train}
        return {"train_dataloaders": self.train, "val_dataloaders": self.validate}


def rank_and_size() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def train_rows() -> int:
    """14 batches of four for each rank, and a last one of two."""
    return (BATCHES * BATCH - 2) * rank_and_size()[1]


def numbers(rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Rows, and what is to be learnt of them, with noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, FEATURES, generator=generator)
    y = x[:, :4].sum(dim=1, keepdim=True).tanh() + 0.1 * torch.randn(rows, 1, generator=generator)
    return x, y


def regression_data() -> TensorDataset:
    return TensorDataset(*numbers(train_rows()))


def train_loader(data: Dataset[Any] | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(data or regression_data(), batch_size=BATCH, shuffle=True, **options)


def validation_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*numbers(VALIDATION_ROWS, seed=2)), batch_size=8)


def network(dropout: float = 0.2, outputs: int = 1, norm: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN),
        nn.BatchNorm1d(HIDDEN) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(HIDDEN, outputs),
    )


class Regressor(LightningModule):
    """The first module that everybody writes."""

    def __init__(self, dropout: float = 0.2, learning_rate: float = 3e-3, norm: bool = False) -> None:
        super().__init__()
        self.network = network(dropout, norm=norm)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def training(module: LightningModule | None = None, *callbacks: Callback, **arguments: Any) -> Training:
    """Plain loaders, three epochs, and the Trainer's arguments as they are given."""
    return Training(
        module=module or Regressor(),
        train=train_loader(),
        validate=validation_loader(),
        arguments={"max_epochs": 3, **arguments},
        callbacks=list(callbacks),
    )


def with_resumable_loader(made: Training) -> Training:
    """The same with our loader, which shows what else of the script cannot be resumed."""
    plain = made.train
    assert isinstance(plain, DataLoader)
    assert isinstance(plain.sampler, RandomSampler)
    rank, size = rank_and_size()
    sampler = ResumableSampler(plain.dataset, size, rank, seed=7)
    made.train = ResumableLoader(plain.dataset, sampler=sampler, batch_size=BATCH, num_workers=plain.num_workers)
    return made
