"""Trainings of replicas, each of which notes what an oracle needs: rows read, weights after each step, what is seen."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from common import FEATURES, SAMPLES, Rows, quiet_trainer
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from azureml_strategy.strategies import AzureMLDDPStrategy

BATCH = 4
# An epoch of two ranks has 8 steps, which is no multiple of most periods.
EPOCHS = 3


class Replica(LightningModule):
    """Learns the sum of a row in float64, with an optimizer and a schedule that the oracle repeats.

    Args:
        optimizer: the class.
        learning_rate: of it.
        schedule: halve the learning rate every so many steps; None for a constant one.
        batch_norm: between the layers.
    """

    def __init__(
        self,
        optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
        learning_rate: float = 0.05,
        schedule: int | None = None,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle: nn.Module = nn.BatchNorm1d(6) if batch_norm else nn.Tanh()
        self.network = nn.Sequential(nn.Linear(FEATURES, 6), middle, nn.Linear(6, 1)).double()
        self.optimizer, self.learning_rate, self.schedule = optimizer, learning_rate, schedule

    def loss(self, rows: Tensor) -> Tensor:
        rows = rows.double()
        return (self.network(rows).squeeze(1) - rows.sum(dim=1)).pow(2).mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=self.learning_rate)  # type: ignore[call-arg]
        if self.schedule is None:
            return optimizer
        halving = torch.optim.lr_scheduler.StepLR(optimizer, self.schedule, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halving, "interval": "step"}}


class Notes(Callback):
    """What a rank reads, its weights after each batch, and what a validation sees."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []
        self.weights: list[list[float]] = []
        self.losses: list[float] = []
        self.validated: list[tuple[int, list[float]]] = []
        self.after_validation: list[list[float]] = []
        self._validated = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.read.append(batch[1].tolist())
        if self._validated:
            self.after_validation.append(values(pl_module))
            self._validated = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.weights.append(values(pl_module))
        self.losses.append(float(outputs["loss"]))

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0 and not trainer.sanity_checking:
            self.validated.append((len(self.weights), values(pl_module)))
            self._validated = True

    def told(self) -> dict[str, Any]:
        names = ("read", "weights", "losses", "validated", "after_validation")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Case:
    """A training: arguments of the strategy, the Trainer, the module, and how its rows are read: the first so many."""

    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    batch_size: int = BATCH
    rows: int = SAMPLES
    same_rows: bool = False


def values(module: nn.Module) -> list[float]:
    """Parameters and buffers in one list, in the order of their names' registration."""
    tensors = [*module.parameters(), *module.buffers()]
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors]).tolist()


def rows_of_rank(case: Case) -> DataLoader[tuple[Tensor, Tensor]]:
    """Of every second row, or of as many rows that are the same on all ranks."""
    rows, ranks = Rows(), int(os.environ["WORLD_SIZE"])
    rank = 0 if case.same_rows else int(os.environ["RANK"])
    return DataLoader(torch.utils.data.Subset(rows, range(rank, case.rows, ranks)), batch_size=case.batch_size)


def train(case: Case, *callbacks: Callback, kind: Any = None, fit: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train, and tell what this rank has noted and has in the end."""
    from azureml_strategy.strategies import AzureMLLocalSGDStrategy

    module, notes = Replica(**case.module), Notes()
    strategy = (kind or AzureMLLocalSGDStrategy)(**case.strategy)
    arguments = {"max_epochs": EPOCHS, "use_distributed_sampler": False, **case.trainer}
    trainer = quiet_trainer(strategy=strategy, callbacks=[notes, *callbacks], **arguments)
    validation = DataLoader(Rows(), batch_size=32)
    trainer.fit(
        module, rows_of_rank(case), validation if case.trainer.get("val_check_interval") else None, **(fit or {})
    )
    return {**notes.told(), "final": values(module), "steps": trainer.global_step}


def train_ddp(case: Case) -> dict[str, Any]:
    """The same under every-step synchronisation."""
    return train(case, kind=lambda **_: AzureMLDDPStrategy())
