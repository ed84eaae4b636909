"""Where the bytes of tensors lie."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.checkpoint.memory import Ranges, has_bytes, lay_out, span


def test_span_reaches_from_the_first_element_to_the_last() -> None:
    matrix = torch.zeros(4, 5)
    assert span(matrix) == span(matrix.t()) == 80
    assert span(matrix[:, 1]) == (3 * 5 + 1) * 4
    assert span(matrix[1:3, 2]) == (5 + 1) * 4


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 10)), min_size=1, max_size=20))
def test_tensors_that_overlap_are_in_one_region_and_others_are_not(pieces: list[tuple[int, int]]) -> None:
    storage = torch.arange(100)
    tensors = [storage[start : start + length] for start, length in pieces]
    regions = lay_out(tensors)
    touched = {place for start, length in pieces for place in range(start, start + length)}
    assert sorted(index for region in regions for index in region.members) == list(range(len(pieces)))
    assert sum(region.size for region in regions) == 8 * len(touched)
    for before, after in pairwise(regions):
        assert before.address + before.size <= after.address
        assert before.target + before.size <= after.target
        assert after.target % 64 == 0
    buffer = torch.zeros(regions[-1].target + regions[-1].size, dtype=torch.uint8)
    for region in regions:
        region.copy_into(buffer)
        assert region.equals(buffer)


def test_ranges_hold_what_lies_in_one_of_them() -> None:
    storage = torch.zeros(100)
    ranges = Ranges([storage[10:20], storage[10:12], storage[50:60]])
    inside = lay_out([storage[11:20], storage[50:60]])
    outside = lay_out([storage[:5], storage[15:25], storage[30:40], storage[55:70]])
    assert all(region in ranges for region in inside)
    assert not any(region in ranges for region in outside)
    assert inside[0] not in Ranges([])


def test_what_is_more_than_bytes() -> None:
    assert has_bytes(torch.zeros(2).t())
    assert not has_bytes(torch.empty(0))
    assert not has_bytes(torch.eye(2).to_sparse())
    assert not has_bytes(torch.empty(2, device="meta"))
    assert not has_bytes(torch.zeros(2, dtype=torch.complex64).conj())
