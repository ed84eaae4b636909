"""A module in three layers, for tests of single pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    build: Callable[[], Any]
    name: str
    kind: str = "linear"
    tied: str | None = None
    tied_parameter: str = "weight"


class Three(LightningModule):
    """Two layers with parameters around a function; `sketched` ones are made on the meta device."""

    def __init__(self, sketched: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.tied = tied
        with torch.device("meta" if sketched else "cpu"):
            self.network = nn.ModuleDict({"first": self.linear(0), "last": self.linear(1)})

    @staticmethod
    def linear(seed: int) -> nn.Linear:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Linear(4, 4)

    def pipeline_layers(self) -> list[Layer]:
        tie = "matrix" if self.tied else None
        return [
            Layer(lambda: self.linear(0), "network.first", tied=tie),
            Layer(lambda: torch.tanh, "tanh", "function"),
            Layer(lambda: self.linear(1), "network.last", tied=tie),
        ]

    def pipeline_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch

    def forward(self, rows: Tensor) -> Tensor:
        return self.network["last"](torch.tanh(self.network["first"](rows)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[1]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
