"""The model and its data. Put yours in their place: train.py and recipe.yaml use these two classes."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Batch = list[Tensor]


class Net(LightningModule):
    """Tells points of several classes apart.

    Args:
        width: numbers in each hidden layer.
        learning_rate: of Adam.
    """

    def __init__(self, width: int = 64, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch of this process."""
        points, classes = batch
        loss = nn.functional.cross_entropy(self.layers(points), classes)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The share of points that are right, over all processes."""
        points, classes = batch
        right = (self.layers(points).argmax(1) == classes).float().mean()
        self.log("val/accuracy", right, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), self.learning_rate)


class Points(LightningDataModule):
    """Three spirals of points in a plane, the same ones on every machine: nothing is downloaded.

    Args:
        batch_size: points of a step in each process.
    """

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Make the points of training and of validation."""
        self.training, self.validation = _spirals(1536, seed=1), _spirals(384, seed=2)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Each process gets its share of them."""
        return DataLoader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The same."""
        return DataLoader(self.validation, self.batch_size)


def _spirals(count: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    classes = torch.arange(count) % 3
    radius = torch.rand(count, generator=random)
    angle = 4 * radius + 2 * torch.pi / 3 * classes + 0.1 * torch.randn(count, generator=random)
    return TensorDataset(torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), classes)
