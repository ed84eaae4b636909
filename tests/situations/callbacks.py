"""Callbacks and modules of users that touch all weights: averages, teachers, pruning, sums and files."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from tests.situations.modules import Regression, Situation
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn


class OwnAverage(Callback):
    """A moving average as many scripts have it, which becomes the weights at the end."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.average = {name: each.detach().clone() for name, each in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            self.average[name].mul_(0.5).add_(parameter.detach(), alpha=0.5)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with torch.no_grad():
            for name, parameter in pl_module.named_parameters():
                parameter.copy_(self.average[name])


class TorchAverage(Callback):
    """torch's AveragedModel of the module's layers, which become the weights at the end."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.average = AveragedModel(pl_module.blocks, avg_fn=get_ema_avg_fn(0.5))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.average.update_parameters(pl_module.blocks)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with torch.no_grad():
            for mine, averaged in zip(pl_module.blocks.parameters(), self.average.module.parameters(), strict=True):
                mine.copy_(averaged)


class Clamps(Callback):
    """Clamps all weights after each step, as a Wasserstein critic's are."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class ReplacesData(Callback):
    """Clamps all weights by new tensors in the place of theirs."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)


class SetsWeights(Callback):
    """Sets all weights after the start, from a dictionary as of a file."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        other = Regression()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
        pl_module.load_state_dict(other.state_dict())


class Teacher(Regression):
    """Keeps a copy of its layers from `on_fit_start`, whose outputs it is to stay near."""

    teacher: list[nn.Module]

    def on_fit_start(self) -> None:
        self.teacher = [
            copy.deepcopy(self.blocks).requires_grad_(False),
            copy.deepcopy(self.head).requires_grad_(False),
        ]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        states = batch[0]
        with torch.no_grad():
            for block in self.teacher[0]:  # type: ignore[attr-defined]
                states = block(states)
            wanted = self.teacher[1](states)
        outputs = self(batch[0])
        return self.loss(outputs, batch[0]) + (outputs - wanted).pow(2).mean()


class MomentumTeacher(Teacher):
    """The teacher follows the student, as in BYOL and DINO, from `__init__` on as a part of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.follower = copy.deepcopy(nn.ModuleList([self.blocks, self.head])).requires_grad_(False)

    def on_fit_start(self) -> None:
        self.teacher = [self.follower[0], self.follower[1]]

    def on_train_batch_end(self, *_: Any) -> None:
        students = [*self.blocks.parameters(), *self.head.parameters()]
        with torch.no_grad():
            for mine, followed in zip(self.follower.parameters(), students, strict=True):
                mine.lerp_(followed, 0.3)

    def configure_optimizers(self) -> Any:
        return self.optimizer(each for each in self.parameters() if each.requires_grad)


class LogsNorm(Callback):
    """Scales the head by the norm of all weights, as it would log it."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        norm = torch.stack([each.detach().norm() for each in pl_module.parameters()]).norm()
        with torch.no_grad():
            pl_module.head.weight.mul_(1 + 0.01 * float(norm))


def _with(*callbacks: Any) -> Any:
    return lambda: {"callbacks": [each() for each in callbacks]}


SITUATIONS: dict[str, Situation] = {
    "ema_weight_averaging": Situation(Regression, _with(lambda: EMAWeightAveraging(decay=0.5))),
    "weight_averaging": Situation(Regression, _with(WeightAveraging)),
    "stochastic_weight_averaging": Situation(
        Regression, _with(lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1))
    ),
    "own_average": Situation(Regression, _with(OwnAverage)),
    "torch_average": Situation(Regression, _with(TorchAverage)),
    "clamps": Situation(Regression, _with(Clamps)),
    "replaces_data": Situation(Regression, _with(ReplacesData)),
    "sets_weights": Situation(Regression, _with(SetsWeights)),
    "pruning": Situation(
        Regression,
        _with(lambda: ModelPruning("l1_unstructured", amount=0.3, use_global_unstructured=True, verbose=0)),
    ),
    "teacher": Situation(Teacher),
    "momentum_teacher": Situation(MomentumTeacher),
    "logs_norm": Situation(Regression, _with(LogsNorm)),
}
