"""A module that shows the averages has its own values back, whatever is done with it meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from azureml_strategy.strategies.local_sgd import fragments
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
        with averaging.with_local_values():
            assert shown(module) == [1.0, 1.0]
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        fails()
    assert shown(module) == [5.0, 5.0]
    averaging.show_local()
    assert shown(module) == [1.0, 1.0]


class Memory(TorchDispatchMode):
    """Counts the bytes that are allocated in it and are still there, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._there: dict[StorageWeakRef, int] = {}

    def keep_out(self, module: nn.Module) -> None:
        for each in (*module.parameters(), *module.buffers()):
            self._there[StorageWeakRef(each.untyped_storage())] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self._there.setdefault(StorageWeakRef(storage), storage.nbytes())
        self._there = {each: size for each, size in self._there.items() if not each.expired()}
        self.most = max(self.most, sum(self._there.values()))
        return out


@pytest.mark.parametrize("for_good", [False, True])
def test_the_averages_take_one_further_copy_of_the_model(
    exchanges: Exchanges, monkeypatch: pytest.MonkeyPatch, for_good: bool
) -> None:
    """And a share that is exchanged, in two copies at most."""
    monkeypatch.setattr(fragments, "_MOST_ELEMENTS", 1024)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)), nn.BatchNorm1d(64))
    averaging = PeriodicAveraging(layers, Rules(), exchanges)
    model = sum(each.nbytes for each in layers.state_dict().values())
    memory = Memory()
    memory.keep_out(layers)
    with memory:
        averaging.end() if for_good else averaging.show_averages()
    assert model < 1.01 * memory.most, "what it counts"
    assert memory.most < 1.02 * model + 2 * 4 * 1024


def test_an_exchange_that_fails_leaves_no_mixture(exchanges: Exchanges, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragments, "_MOST_ELEMENTS", 2)
    module = nn.Linear(8, 1, bias=False)
    before = module.weight.detach().clone()
    averaging, calls = PeriodicAveraging(module, Rules(), exchanges), []

    def mean(tensor: Tensor) -> Tensor:
        calls.append(tensor)
        if len(calls) == 3:
            raise RuntimeError("the network is gone")
        return tensor + 1

    monkeypatch.setattr(exchanges, "mean", mean)
    with pytest.raises(RuntimeError, match="the network is gone"):
        averaging.show_averages()
    assert torch.equal(module.weight, before)
