"""A script whose arguments LightningCLI makes of the model, the data and the Trainer.

On a laptop:             python train.py fit --config config.yaml
As a job of two nodes:   azureml-strategy emulate --nodes 2 -- python train.py fit --config config.yaml
With another strategy:   ... --trainer.strategy azureml_strategy.strategies.AzureMLDDPStrategy \
                             --trainer.strategy.gradient_compression bf16
All there is to set:     python train.py fit --help
"""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import azureml_strategy  # noqa: F401 - registers azureml_ddp; class paths would need no import


class Circle(LightningModule):
    """Learns which points lie inside the unit circle.

    Args:
        width: hidden units.
        learning_rate: of Adam.
    """

    def __init__(self, width: int = 64, learning_rate: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        points, inside = batch
        loss = nn.functional.cross_entropy(self.network(points), inside)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        points, inside = batch
        self.log("val/accuracy", (self.network(points).argmax(1) == inside).float().mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class Points(LightningDataModule):
    """Points of a plane, and whether they lie inside the unit circle.

    Args:
        samples: points to train on; a quarter as many to validate and test on.
        batch_size: of each process.
    """

    def __init__(self, samples: int = 4096, batch_size: int = 64) -> None:
        super().__init__()
        self.samples = samples
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.samples, seed=0, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.samples // 4, seed=1)

    test_dataloader = val_dataloader

    def _loader(self, samples: int, seed: int, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
        points = 1.5 * torch.randn(samples, 2, generator=torch.Generator().manual_seed(seed))
        inside = (points.norm(dim=1) < 1).long()
        return DataLoader(TensorDataset(points, inside), self.batch_size, shuffle=shuffle)


if __name__ == "__main__":
    LightningCLI(Circle, Points)
