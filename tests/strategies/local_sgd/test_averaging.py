"""A module that shows the averages has its own values back, whatever is done with it meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from azureml_strategy.strategies.local_sgd.averaging import PeriodicAveraging
from azureml_strategy.strategies.local_sgd.exchange import Exchanges
from azureml_strategy.strategies.local_sgd.period import Rules


@pytest.fixture
def exchanges() -> Iterator[Exchanges]:
    started = Exchanges(None, torch.device("cpu"))
    yield started
    assert started.close(wait_s=60)


@pytest.fixture
def module() -> nn.Module:
    layer = nn.Linear(2, 1)
    nn.init.constant_(layer.weight, 1.0)
    return layer


def shown(module: nn.Module) -> list[float]:
    return module.get_parameter("weight").flatten().tolist()


def show(module: nn.Module, value: float) -> None:
    nn.init.constant_(module.get_parameter("weight"), value)


def test_averaged_gives_the_values_back_after_an_error(module: nn.Module, exchanges: Exchanges) -> None:
    averaging = PeriodicAveraging(module, Rules(), exchanges)

    def fails() -> None:
        with averaging.averaged():
            show(module, 5.0)
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        fails()
    assert shown(module) == [1.0, 1.0]
    show(module, 2.0)
    with averaging.averaged():
        assert shown(module) == [2.0, 2.0], "the averages of now"


def test_own_gives_the_averages_back_after_an_error(module: nn.Module, exchanges: Exchanges) -> None:
    averaging = PeriodicAveraging(module, Rules(), exchanges)
    averaging.show_averages()
    show(module, 5.0)

    def fails() -> None:
        with averaging.own():
            assert shown(module) == [1.0, 1.0]
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        fails()
    assert shown(module) == [5.0, 5.0]
    averaging.show_own()
    assert shown(module) == [1.0, 1.0]
