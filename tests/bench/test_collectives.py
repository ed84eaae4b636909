from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from azureml_strategy.bench import collectives
from azureml_strategy.bench import collectives as module
from azureml_strategy.bench.collectives import AllReduce, Check, Place, check, contribution, fill

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@given(world_size=st.integers(1, 1024), start=st.integers(0, 2**33))
def test_sums_are_exact_in_any_order(dtype: torch.dtype, world_size: int, start: int) -> None:
    """Running sums in the data type itself, forwards and backwards, are the float64 sum."""
    indices = torch.arange(start, start + 8)
    parts = [contribution(rank, indices, world_size, dtype) for rank in range(world_size)]
    exact = torch.stack(parts).sum(0)
    for order in (parts, parts[::-1]):
        total = torch.zeros(8, dtype=dtype)
        for part in order:
            total += part.to(dtype)
        assert torch.equal(total.double(), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 8, 512])
def test_neither_ranks_nor_neighbours_are_alike(dtype: torch.dtype, world_size: int) -> None:
    first, second = (contribution(rank, torch.arange(100_000), world_size, dtype) for rank in (0, 1))
    largest = first.abs().max().item()
    alike = 1 / (2 * largest + 1)  # by chance
    assert (first == second).double().mean().item() == pytest.approx(alike, rel=0.1)
    assert (first[1:] == first[:-1]).double().mean().item() == pytest.approx(alike, rel=0.1)
    assert len(first.unique()) == 2 * largest + 1, "all values occur"


def test_of_several_ranks_at_once() -> None:
    indices, ranks = torch.tensor([5, 5, 9]), torch.tensor([0, 3, 3])
    together = contribution(ranks, indices, 4, torch.float32)
    apart = [contribution(int(rank), indices, 4, torch.float32)[i] for i, rank in enumerate(ranks)]
    assert together.tolist() == [value.item() for value in apart]


def test_filling_in_blocks_is_filling_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 7)
    tensor = torch.empty(100, dtype=torch.bfloat16)
    fill(tensor, 2, 4)
    assert torch.equal(tensor.double(), contribution(2, torch.arange(100), 4, torch.bfloat16))


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
    monkeypatch.setattr(collectives, "BLOCK", block)
    assert found(AllReduce(), alone) == Check(1000, 0)
    for index in (0, 6, 7, 999):
        assert found(Wrong(slice(index, index + 1)), alone) == Check(1000, 1)
    assert found(Wrong(slice(None)), alone) == Check(1000, 1000)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e-4])
def test_there_is_no_tolerance(alone: Place, wrong: float) -> None:
    assert found(Wrong(slice(3, 5), wrong), alone) == Check(1000, 2)


@pytest.mark.parametrize("block", [3, 4096])
def test_of_many_elements_evenly_spaced_ones_are(alone: Place, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(collectives, "BLOCK", block)
    monkeypatch.setattr(collectives, "_MOST_COMPUTED", 101)
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
