"""A check compares all elements, or evenly spaced ones; what three ranks find is in tests/multiprocess."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from azureml_strategy.network.collectives import Place, checking
from azureml_strategy.network.collectives.checking import Check, check
from azureml_strategy.network.collectives.operations import AllReduce


class Wrong(AllReduce):
    """Adds 1 to the elements of a slice."""

    def __init__(self, where: slice, by: float = 1) -> None:
        self.where, self.by = where, by

    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        super().run(sent, received, place)
        sent[self.where] += self.by


def found(collective: AllReduce, place: Place, total: int = 1000, dtype: torch.dtype = torch.float32) -> Check:
    return check(collective, *collective.buffers(total, place, dtype), total, place)


@pytest.mark.parametrize("block", [1, 7, 1000, 4096])
def test_every_element_is_compared(alone: Place, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(checking, "BLOCK", block)
    assert found(AllReduce(), alone) == Check(1000, 0)
    for index in (0, 6, 7, 999):
        assert found(Wrong(slice(index, index + 1)), alone) == Check(1000, 1)
    assert found(Wrong(slice(None)), alone) == Check(1000, 1000)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e-4])
def test_there_is_no_tolerance(alone: Place, wrong: float) -> None:
    assert found(Wrong(slice(3, 5), wrong), alone) == Check(1000, 2)


@pytest.mark.parametrize("block", [3, 4096])
def test_of_many_elements_evenly_spaced_ones_are(alone: Place, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(checking, "BLOCK", block)
    monkeypatch.setattr(checking, "_MOST_COMPUTED", 101)
    assert found(AllReduce(), alone) == Check(100, 0)
    assert found(Wrong(slice(500, 600)), alone) == Check(100, 10)


def test_a_reused_buffer_hides_nothing(alone: Place) -> None:
    """What is left of a right result must not pass for another."""

    class Idle(AllReduce):
        def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
            """Neither sends nor receives, into a buffer of its own."""

        def buffers(self, total: int, place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            return torch.zeros(total), torch.zeros(total)

    collective = Idle()
    sent, received = collective.buffers(100, alone, torch.float32)
    received.copy_(AllReduce().expected(torch.arange(100), 100, alone, torch.float32))
    assert check(collective, sent, received, 100, alone).wrong == 100
