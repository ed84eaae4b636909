"""The module that situations build on, and what a situation is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES, WIDTH = 8, 16
GLOBAL_BATCH, BATCHES, EPOCHS = 8, 3, 2


@dataclass(frozen=True)
class Situation:
    """One thing that a user's script does.

    Attributes:
        module: makes the module.
        trainer: arguments of the Trainer, made anew for each training.
        fits: how often the module is trained, each time by a Trainer of its own.
    """

    module: Callable[[], LightningModule]
    trainer: Callable[[], dict[str, Any]] = dict
    fits: int = 1


@dataclass(frozen=True)
class Layer:
    """A layer of a pipeline, which the module has."""

    name: str
    layer: nn.Module
    kind: str = "layer"
    tied: None = None
    tied_parameter: str = "weight"

    def build(self) -> nn.Module:
        return self.layer


class Block(nn.Module):
    """A matrix and what follows it."""

    def __init__(self, inputs: int = WIDTH, outputs: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, states: Tensor) -> Tensor:
        return torch.tanh(self.linear(states))


class Mixture(Block):
    """Gives each row to one of two experts, and calls an expert only if it has rows.

    By the rows of `loader`, each expert has some in each step, but a process that has a part of them may have none. The
    experts begin as those of low-rank adapters do: the first gradients of their first layers are exactly zero.
    """

    def __init__(self) -> None:
        super().__init__(FEATURES)
        experts = [nn.Sequential(nn.Linear(FEATURES, 2), nn.Linear(2, FEATURES, bias=False)) for _ in range(2)]
        for expert in experts:
            nn.init.zeros_(expert[1].weight)
        self.experts = nn.ModuleList(experts)

    def forward(self, states: Tensor) -> Tensor:
        chosen, made = states[:, 3] > -0.3, states.clone()
        for number, expert in enumerate(self.experts):
            rows = chosen == bool(number)
            if rows.any():
                made[rows] = states[rows] + expert(states[rows])
        return super().forward(made)


class WeighedMixture(Mixture):
    """Calls both experts in each step, as strategies ask that cut gradients or parameters, and weighs them by row."""

    def forward(self, states: Tensor) -> Tensor:
        chosen = (states[:, 3:4] > -0.3).to(states.dtype)
        zeroth, first = (expert(states) for expert in self.experts)
        return Block.forward(self, states + (1 - chosen) * zeroth + chosen * first)


class Regression(LightningModule):
    """Blocks that learn the sum of a row, as a user writes it: made in `__init__`, called by `self(rows)`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Block(FEATURES), Block(), Block()])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, states: Tensor) -> Tensor:
        for block in self.blocks:
            states = block(states)
        return self.head(states)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(self(batch[0]), batch[0])
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def loss(self, outputs: Tensor, rows: Tensor) -> Tensor:
        return (outputs.squeeze(1) - rows.sum(1)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())

    def optimizer(self, parameters: Iterable[Any], rate: float = 0.05) -> Optimizer:
        """SGD without a momentum, under which an average of replicas after each step is that of their gradients."""
        return torch.optim.SGD(parameters, lr=rate)

    def sharded_blocks(self) -> Iterable[nn.Module]:
        return list(self.blocks)

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Cuts the columns of one block and the rows of the head: they do not depend on what a situation changes."""
        return {"blocks.0.linear": "colwise_gather_output"}

    def pipeline_layers(self) -> list[Layer]:
        return [Layer(f"blocks.{index}", block) for index, block in enumerate(self.blocks)] + [Layer("head", self.head)]

    def pipeline_batch(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0], batch[0]


def loader(replica: int, replicas: int) -> DataLoader[tuple[Tensor, ...]]:
    """The same rows in each step, whatever the number of replicas is that share them."""
    rows = TensorDataset(torch.randn(GLOBAL_BATCH * BATCHES, FEATURES, generator=torch.Generator().manual_seed(7)))
    share = DistributedSampler(rows, replicas, replica, shuffle=False)
    return DataLoader(rows, batch_size=GLOBAL_BATCH // replicas, sampler=share)


def in_epoch(trainer: Trainer, epoch: int) -> bool:
    return trainer.current_epoch == epoch
