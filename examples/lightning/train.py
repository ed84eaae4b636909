"""A plain Lightning script: the same line trains on a laptop and on all processes of an Azure ML job.

python examples/lightning/train.py --lr 0.1 --epochs 2
azureml-strategy emulate --nodes 2 -- python examples/lightning/train.py --lr 0.1 --epochs 2
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import azureml_strategy  # noqa: F401 - registers strategy="azureml_ddp"


class Classifier(LightningModule):
    """Tells whether the sum of eight numbers is positive."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Log the loss of all processes."""
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.network(inputs), labels)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the accuracy of all processes."""
        inputs, labels = batch
        accuracy = (self.network(inputs).argmax(dim=1) == labels).float().mean()
        self.log("val/accuracy", accuracy, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


def samples(seed: int, number: int) -> TensorDataset:
    """Return random inputs with their labels."""
    inputs = torch.randn(number, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


def main() -> None:
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="of each process")
    options = parser.parse_args()
    seed_everything(0)
    training = DataLoader(samples(1, 512), options.batch_size)
    validation = DataLoader(samples(2, 128), options.batch_size)
    trainer = Trainer(strategy="azureml_ddp", max_epochs=options.epochs, log_every_n_steps=1)
    trainer.fit(Classifier(options.lr), training, validation)


if __name__ == "__main__":
    main()
