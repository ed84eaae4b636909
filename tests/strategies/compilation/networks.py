"""Networks to compile, how they are fitted, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
)
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from azureml_strategy.strategies import AzureMLDDPStrategy

Loader = DataLoader[tuple[torch.Tensor, ...]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(torch.relu(self.up(inputs)))


class Wide(Block):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)


class Counting(Block):
    """Its number is part of the graph."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs) * (1 + self.calls / 1000)


class Branching(Block):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.up(inputs)
        if hidden.sum() > 0:  # this line cuts the graph
            hidden = hidden * 2
        return self.down(hidden)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.norm(self.layer(inputs))


class Net(LightningModule):
    """Some blocks between two layers; it keeps its losses."""

    def __init__(self, *kinds: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(kind() for kind in kinds or (Block, Block, Block))
        self.mean = MeanMetric()
        self.losses: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.mean.update(loss.detach())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Plain(Net):
    """Has no forward: a step calls its network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        del self.first, self.last, self.blocks
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.network(batch[0]).mean(-1, keepdim=True), batch[1])
        self.losses.append(loss.item())
        return loss


class Adversaries(LightningModule):
    """Two networks that train in turn, by hand; the first has two backward passes through one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.makes, self.judges = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        makes, judges = self.optimizers()
        made = self.makes(batch[0])
        self.manual_backward(self.judges(made).mean(), retain_graph=True)
        self.manual_backward(made.pow(2).mean())
        makes.step()
        makes.zero_grad()
        judges.zero_grad()
        loss = self.judges(batch[0]).pow(2).mean() - self.judges(made.detach()).mean()
        self.manual_backward(loss)
        judges.step()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(each.parameters(), 0.05) for each in (self.makes, self.judges)]


class Penalised(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs = batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(self(inputs).sum(), inputs, create_graph=True)
        return (slope.norm(dim=1) - 1).pow(2).mean()


class FailsLater(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise ArithmeticError("mine")
        return super().training_step(batch, batch_idx)


class Experts(Net):
    """Its loop cannot be compiled, and calls blocks with as many samples as fall to each."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        outputs = torch.zeros_like(hidden)
        for index, block in enumerate(self.blocks):
            chosen = (hidden.argmax(1) % len(self.blocks) == index).nonzero()[:, 0]  # of a size that depends on data
            outputs = outputs.index_add(0, chosen, block(hidden[chosen]))
        return self.last(outputs)


class Reads(Net):
    """Torch compiles no LSTM."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.network(self.first(inputs))[0])


class ReadsInStep(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.network(batch[0])[0].mean(-1, keepdim=True), batch[1])
        self.losses.append(loss.item())
        return loss


class Shortens(Plain):
    """Its sequences have another length in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        kept = 2 + batch_idx % 4
        return super().training_step((batch[0][:, :kept].contiguous(), batch[1][:, :kept]), batch_idx)


def loader(samples: int = 32, *shape: int) -> Loader:
    inputs = torch.randn(samples, *(shape or (4,)), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.sum(-1, keepdim=True)), 8)


def fitted(make: Callable[[], Any], how: Any, data: Loader, callbacks: Any = (), **settings: Any) -> tuple[Any, int]:
    """Fit a module that has the same weights each time; return it with the number of graphs."""
    seed_everything(1, verbose=False)
    module = make()
    graphs = counters["stats"]["unique_graphs"]
    trainer = Trainer(
        strategy=AzureMLDDPStrategy(compile=how),
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False, "enable_progress_bar": False},
        **{"enable_model_summary": False, "callbacks": list(callbacks)},
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        **settings,
    )
    trainer.fit(module, data, loader(11))
    return module, counters["stats"]["unique_graphs"] - graphs


def said(record: pytest.WarningsRecorder) -> list[str]:
    words = (
        "compiled again",
        "could not be compiled",
        "compiled part is cut",
        "fits none",
        "compiled nothing",
        "so far",
        "nothing that has gradients",
    )
    return [text for each in record if any(word in (text := str(each.message)) for word in words)]


def is_plain(module: nn.Module) -> bool:
    return all(each._compiled_call_impl is None for each in module.modules())
