"""Trainings of several lengths: after which steps the ranks look at what they must have alike."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule, Trainer
from tests.multiprocess.scripts.common import FEATURES, Regression, quiet_trainer, report
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.strategies.replica_check import callback
from azureml_strategy.strategies.replica_check.fingerprints import Copy, copies_of


class TwoSteps(Regression):
    """Steps two optimizers in each batch."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.zero_grad()
        self.manual_backward(loss)
        for each in self.optimizers():  # type: ignore[union-attr]
            each.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.network[layer].parameters(), lr=0.01) for layer in (0, 2)]


def looks(module: LightningModule, batches: int, **settings: Any) -> tuple[int, list[int]]:
    """The rank, and the steps after which it has looked."""
    steps: list[int] = []

    def noted(trainer: Trainer) -> list[Copy]:
        steps.append(trainer.global_step)
        return copies_of(trainer)

    trainer = quiet_trainer(strategy="azureml_ddp", devices=2, **settings)
    rows = TensorDataset(torch.randn(2 * batches, FEATURES), torch.randn(2 * batches))
    with patch.object(callback, "copies_of", noted), patch.object(callback, "_EVERY", 48):
        trainer.fit(module, DataLoader(rows))
    return trainer.global_rank, steps


def main() -> None:
    rank, long = looks(Regression(), 130, max_epochs=1)
    _, epochs = looks(Regression(), 5, max_epochs=3)
    _, accumulated = looks(Regression(), 40, max_epochs=1, accumulate_grad_batches=2)
    _, two_steps = looks(TwoSteps(), 25, max_epochs=1)
    report(rank, long=long, epochs=epochs, accumulated=accumulated, two_steps=two_steps)


if __name__ == "__main__":
    main()
