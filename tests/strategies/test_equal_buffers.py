"""The hash by which ranks see that a buffer has changed."""

from __future__ import annotations

import pytest
import torch

from azureml_strategy.strategies.equal_buffers import fingerprint

TYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float16),
    *(torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_order_of_round_numbers_counts(dtype: torch.dtype) -> None:
    """Of 0 and 1, whose bits are zeros but for a few, all 12,870 orders of a mask have hashes of their own."""
    rows = torch.cartesian_prod(*[torch.tensor([0, 1])] * 16)
    masks = rows[rows.sum(1) == 8].to(dtype)
    assert len({int(fingerprint(mask)) for mask in masks}) == len(masks) == 12_870


@pytest.mark.parametrize("other", [torch.nan, torch.inf])
def test_what_is_beside_no_number_counts(other: float) -> None:
    assert fingerprint(torch.tensor([other, 1.0])) != fingerprint(torch.tensor([other, 2.0]))
    assert fingerprint(torch.tensor([other, 1.0])) == fingerprint(torch.tensor([other, 1.0]))


@pytest.mark.parametrize("moved", [1, 1 << 16, 1 << 17])
def test_the_place_in_a_large_tensor_counts(moved: int) -> None:
    """By one element, and by as many as are hashed together."""
    large = torch.zeros(200_000)
    large[5] = 1.0
    assert fingerprint(large) != fingerprint(large.roll(moved))


def test_shapes_and_views() -> None:
    assert fingerprint(torch.tensor(3.0)).shape == ()
    assert fingerprint(torch.empty(0)) == 0
    square = torch.randn(3, 4, dtype=torch.complex64)
    assert fingerprint(square.mT) == fingerprint(square.mT.contiguous())
    assert fingerprint(square.conj()) == fingerprint(square.conj().resolve_conj())
