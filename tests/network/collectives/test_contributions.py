"""What ranks contribute: known to all, different everywhere, and exact in every data type."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.network.collectives import contributions as module
from azureml_strategy.network.collectives.contributions import contribution, fill

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
