"""The model of torchft's published histories: two layers of one weight, whose gradients are always 2."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class TwoLayers(LightningModule):
    """Weights of 1, and SGD with learning rate 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def loss(self, batch: Any = None) -> Tensor:
        return torch.stack([2 * parameter.sum() for parameter in self.parameters()]).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)
