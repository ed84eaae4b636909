"""Scripts that keep a second set of weights, or change the weights after the optimizer has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging
from tests.faults.scripts.common import Regressor, Training, network, training
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def ema_callback() -> Training:
    """Lightning's own."""
    average = EMAWeightAveraging(decay=0.9)
    made = training(None, average)
    made.kept = lambda: {"average": average._average_model.state_dict() if average._average_model else None}
    return made


class MovingAverage(Callback):
    """As in a hundred repositories: torch's AveragedModel, validated and saved by a callback."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.model: AveragedModel | None = None
        self.trained: dict[str, Tensor] = {}
        self.last_step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.model is None:
            self.model = AveragedModel(pl_module.network, multi_avg_fn=get_ema_multi_avg_fn(self.decay))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        if trainer.global_step != self.last_step:
            self.last_step = trainer.global_step
            self.model.update_parameters(pl_module.network)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.trained = copy.deepcopy(pl_module.network.state_dict())
            pl_module.network.load_state_dict(self.model.module.state_dict())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.trained:
            pl_module.network.load_state_dict(self.trained)
            self.trained = {}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "last_step": self.last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.model.load_state_dict(state_dict["model"])
        self.last_step = state_dict["last_step"]


def ema_own_callback() -> Training:
    average = MovingAverage()
    made = training(None, average)
    made.kept = lambda: {"average": average.model.state_dict()}
    return made


class AveragesItself(Regressor):
    """An average in buffers of the module, with the module's own hooks."""

    def __init__(self, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        self.average = copy.deepcopy(self.network).requires_grad_(False)
        self.kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for average, weight in zip(self.average.parameters(), self.network.parameters(), strict=True):
            average.lerp_(weight, 1 - self.decay)

    def on_validation_start(self) -> None:
        self.kept = copy.deepcopy(self.network.state_dict())
        self.network.load_state_dict(self.average.state_dict())

    def on_validation_end(self) -> None:
        self.network.load_state_dict(self.kept)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.network.parameters(), lr=self.learning_rate)


def ema_module() -> Training:
    return training(AveragesItself(), val_check_interval=5)


def swa() -> Training:
    callback = StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1, annealing_epochs=2)
    made = training(None, callback, max_epochs=4)
    made.kept = lambda: {"average": callback._average_model.state_dict() if callback._average_model else None}
    return made


def swa_batch_norm() -> Training:
    callback = StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2, annealing_epochs=1)
    made = training(Regressor(norm=True), callback, max_epochs=4)
    made.kept = lambda: {"average": callback._average_model.state_dict() if callback._average_model else None}
    return made


class Bootstrapped(Regressor):
    """Learns from a slow copy of itself, as in DQN and BYOL, which follows in the module's own hook."""

    def __init__(self, tau: float = 0.05) -> None:
        super().__init__()
        self.tau = tau
        self.target = network(dropout=0.0).requires_grad_(False)
        self.target.load_state_dict(self.network.state_dict())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            goal = y + 0.5 * self.target(x.roll(1, dims=0))
        loss = nn.functional.mse_loss(self(x), goal)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for slow, fast in zip(self.target.parameters(), self.network.parameters(), strict=True):
            slow.data.copy_(self.tau * fast.data + (1 - self.tau) * slow.data)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.network.parameters(), lr=self.learning_rate)


def target_network() -> Training:
    return training(Bootstrapped())


class ClampedAtBatchEnd(Regressor):
    """Max-norm of the rows, through `.data`, when the step is done."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for layer in self.network:
            if isinstance(layer, nn.Linear):
                layer.weight.data = torch.renorm(layer.weight.data, p=2, dim=0, maxnorm=0.6)


class ClampedBeforeZeroGrad(Regressor):
    """The same with `copy_`, in the hook between the next loss and its gradient."""

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        for layer in self.network:
            if isinstance(layer, nn.Linear):
                layer.weight.data.copy_(torch.renorm(layer.weight.data, p=2, dim=0, maxnorm=0.6))


def clamp_batch_end() -> Training:
    return training(ClampedAtBatchEnd())


def clamp_zero_grad() -> Training:
    return training(ClampedBeforeZeroGrad())


class Lookahead(torch.optim.Optimizer):
    """k steps forward, one step back (Zhang et al. 2019), around another optimizer."""

    def __init__(self, base: torch.optim.Optimizer, k: int = 4, alpha: float = 0.5) -> None:
        self.base, self.k, self.alpha = base, k, alpha
        super().__init__(base.param_groups, base.defaults)
        self.param_groups = base.param_groups
        for group in self.param_groups:
            group["counter"] = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.base.step(closure)
        for group in self.param_groups:
            group["counter"] = (group["counter"] + 1) % self.k
            for parameter in group["params"]:
                state = self.base.state[parameter]
                if "slow" not in state:
                    state["slow"] = parameter.data.clone()
                if group["counter"] == 0:
                    state["slow"] += self.alpha * (parameter.data - state["slow"])
                    parameter.data.copy_(state["slow"])
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


class LooksAhead(Regressor):
    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.Adam(self.parameters(), lr=self.learning_rate))


def lookahead() -> Training:
    return training(LooksAhead())


def pruning() -> Training:
    """Lightning's own: a further tenth of the weights goes at each epoch's end."""
    return training(None, ModelPruning("l1_unstructured", amount=0.1, parameter_names=["weight"]))
