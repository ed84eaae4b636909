"""What trains in evaluation mode is named at the start of a fit; what is frozen or no optimizer has is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tests.multiprocess.scripts.common import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from azureml_strategy.strategies.launched import warn_of_evaluation_modes


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.teacher = nn.Sequential(nn.Linear(4, 1)).eval()
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.body(batch)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.body.parameters(), *self.head.parameters()], lr=0.1)


class Tells(Callback):
    """As the strategies do."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        warn_of_evaluation_modes(pl_module)


def whole(net: Net) -> None:
    net.eval()


def body(net: Net) -> None:
    net.body.eval()


def frozen_body(net: Net) -> None:
    net.body.eval().requires_grad_(False)


def statistics(net: Net) -> None:
    net.body[1].eval()


def nothing(net: Net) -> None:
    pass


@pytest.mark.parametrize(
    ("prepare", "named"), [(whole, "Net"), (body, "body"), (frozen_body, None), (statistics, None), (nothing, None)]
)
def test_what_trains_in_evaluation_mode_is_named(prepare: Callable[[Net], None], named: str | None) -> None:
    net = Net()
    prepare(net)
    modes = {name: each.training for name, each in net.named_modules()}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer = quiet_trainer(devices=1, max_steps=1, callbacks=[Tells()])
        trainer.fit(net, DataLoader(torch.randn(4, 4), batch_size=4))
    told = [str(each.message) for each in warned if "in evaluation mode" in str(each.message)]
    assert [each.split(" will")[0] for each in told] == ([] if named is None else [named])
    assert {name: each.training for name, each in net.named_modules()} == modes, "Lightning keeps modes"
