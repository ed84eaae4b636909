"""Parameters that do not train are named; those that need not change are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from tests.multiprocess.scripts.common import FEATURES, Regression, loader, quiet_trainer
from torch import Tensor, nn

from azureml_strategy.strategies.replica_check import ReplicaCheck
from azureml_strategy.strategies.replica_check.updates import UpdateWatch


class Quiet(Regression):
    """Parts that a step leaves alone by right: an unused expert, a frozen layer, a bias before a normalisation."""

    def __init__(self) -> None:
        super().__init__(batch_norm=True)
        self.expert, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)


class NotInOptimizer(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.network[0].parameters(), lr=0.05)


class Replaced(Regression):
    def on_train_start(self) -> None:
        self.network = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))


class PutBack(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.network[2].bias.zero_()

    def on_train_batch_end(self, *_: Any) -> None:
        self.on_train_batch_start(None, 0)


class AddedLate(PutBack):
    """Its second layer comes to the optimizer after the first has long changed."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        optimizer: Any = self.optimizers()
        if self.global_step == 3 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [*self.network[2].parameters()]})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.network[0].parameters(), lr=0.05)


class NoRate(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Warming(Regression):
    """Begins with rates that float32 rounds away."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-14 * 2**step)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Rounded(Regression):
    """A scale of 1 in bfloat16 that small steps cannot change."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale.float().square().squeeze()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-5)


class AccumulatesItself(Regression):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 3 == 2:
            optimizer.step(optimizer_closure)
        else:
            optimizer_closure()


class Skipped(Regression):
    """DeepSpeed's engine counts so where gradients were infinite on another rank: no step is made."""

    skipped_steps = 0

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        self.skipped_steps += 1


class Compensating(torch.optim.Optimizer):
    """SGD that keeps what a weight of 16 bits rounds off, until it counts."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                exact = state.setdefault("exact", parameter.float())
                exact -= 1e-5 * parameter.grad.float()
                parameter.copy_(exact)
        return loss


class Compensated(Rounded):
    def configure_optimizers(self) -> Any:
        return Compensating(self.parameters(), {})


class OwnOptimizer(Regression):
    """Steps an optimizer that Lightning does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.own = torch.optim.SGD(self.network[2].parameters(), lr=0.05)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.zero_grad()
        self.manual_backward(loss)
        self.own.step()
        self.optimizers().step()  # type: ignore[union-attr]
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.network[0].parameters(), lr=0.05)


@pytest.mark.parametrize("method", ["before_step", "after_batch"])
def test_a_fault_of_its_own_is_one_warning(
    method: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UpdateWatch, method, lambda *_: 1 / 0)
    trainer = quiet_trainer(callbacks=[ReplicaCheck()])
    trainer.fit(Regression(), loader(8))
    assert trainer.global_step > 2
    assert len([each for each in caplog.records if "ZeroDivisionError" in each.getMessage()]) == 1


@pytest.mark.parametrize(
    "module", [Regression, Quiet, NoRate, Warming, AccumulatesItself, Compensated, OwnOptimizer, Skipped]
)
def test_nothing_is_said(module: Callable[[], LightningModule], caplog: pytest.LogCaptureFixture) -> None:
    quiet_trainer(callbacks=[ReplicaCheck()], max_epochs=2).fit(module(), loader(8))
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == []


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (NotInOptimizer, "gradients but no optimizer, so that they do not train: network.2.weight, network.2.bias."),
        (Replaced, "4 of them are no longer the module's"),
        (PutBack, "have not changed: network.2.bias."),
        (AddedLate, "have not changed: network.2.bias."),
        (Rounded, "lose their updates to rounding"),
    ],
)
def test_what_does_not_train_is_named(
    module: Callable[[], LightningModule], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    quiet_trainer(callbacks=[ReplicaCheck()], max_epochs=2).fit(module(), loader(4))
    assert any(said in each.getMessage() for each in caplog.records), caplog.text
    assert all("REPLICA_CHECK=off" in each.getMessage() for each in caplog.records if each.levelname == "WARNING")
