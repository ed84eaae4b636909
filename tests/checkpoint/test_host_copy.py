"""A copy that later changes do not reach, in memory that is used again."""

from __future__ import annotations

import io
import resource
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from azureml_strategy.checkpoint.host_copy import HostCopyBuffer, has_bytes, lay_out, span


def saved(content: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


def everything() -> dict[str, Any]:
    shared = torch.arange(50_000.0)
    return {
        "overlap": [shared[5:3000], shared[2000:30_000]],
        "tied": {"first": shared[10:20], "again": shared[10:20]},
        "turned": torch.randn(40, 30).t(),
        "steps": [torch.tensor(float(step)) for step in range(30)],
        "types": [torch.ones(3, dtype=each) for each in (torch.bfloat16, torch.int64, torch.bool, torch.complex64)],
        "empty": torch.empty(0, 3),
        "parameter": nn.Parameter(torch.randn(4), requires_grad=False),
        "sparse": torch.eye(3).to_sparse(),
        "plain": (1, None, "name", {"deep": [2.5]}),
    }


def flat(content: Any) -> list[Any]:
    if isinstance(content, dict):
        return [each for value in content.values() for each in flat(value)]
    if isinstance(content, (list, tuple)):
        return [each for value in content for each in flat(value)]
    return [content]


def test_it_writes_the_file_that_the_original_would_have_been() -> None:
    content = everything()
    expected = flat(torch.load(saved(content), weights_only=True))
    taken = HostCopyBuffer().copy(content)
    for each in flat(content):
        if isinstance(each, Tensor) and not each.is_sparse:
            each.zero_()
    found = flat(torch.load(saved(taken.content()), weights_only=True))
    for one, other in zip(found, expected, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            assert one.is_sparse or one.stride() == other.stride()
            assert torch.equal(one.to_dense(), other.to_dense())
        else:
            assert one == other


def test_what_shares_memory_shares_it_in_the_copy_and_only_what_is_shown_is_copied() -> None:
    large = torch.randn(1_000_000)
    tied = large[100:200]
    module = {"embedding": tied, "head": tied, "inside": large[150:160], "apart": large[5000:5010]}
    found = HostCopyBuffer().copy(module).content()
    assert found["embedding"] is found["head"]
    found["embedding"].fill_(7)
    assert found["inside"].unique().tolist() == [7]
    assert found["apart"].untyped_storage().nbytes() == 40
    assert saved(found).getbuffer().nbytes < 5000


def test_the_memory_is_used_again_whatever_comes() -> None:
    buffer = HostCopyBuffer()
    first = buffer.copy({"a": torch.ones(1000), "b": torch.ones(10)}).content()
    addresses = [each.data_ptr() for each in first.values()]
    again = buffer.copy({"a": torch.zeros(1000), "b": torch.zeros(10)}).content()
    assert min(each.data_ptr() for each in again.values()) == min(addresses)
    less = buffer.copy({"a": torch.full((900,), 3, dtype=torch.float16)}).content()
    assert less["a"].data_ptr() == min(addresses)
    more = buffer.copy({"a": torch.ones(1000), "state": {"exp_avg": torch.full((5000,), 2.0)}}).content()
    assert more["state"]["exp_avg"].sum() == 10_000


def test_later_writes_of_any_kind_do_not_reach_it() -> None:
    flat = torch.arange(100_000.0)
    parameter = nn.Parameter(torch.empty(0))
    parameter.data = flat[:60_000].view(200, 300)
    moments = torch.ones(50_000)
    taken = HostCopyBuffer().copy({"parameter": parameter, "moments": moments, "flat": flat, "few": flat[:3]})
    flat.mul_(-1)
    parameter.requires_grad_(False)
    moments.data.zero_()
    moments.numpy()[7] = 5
    found = taken.content()
    assert torch.equal(found["flat"], torch.arange(100_000.0))
    assert torch.equal(found["few"], torch.arange(3.0))
    assert torch.equal(found["parameter"], torch.arange(60_000.0).view(200, 300))
    assert type(found["parameter"]) is nn.Parameter
    assert found["parameter"].requires_grad
    assert found["moments"].unique().tolist() == [1]


def test_a_tensor_that_gets_other_memory_afterwards() -> None:
    weights = torch.ones(1000)
    taken = HostCopyBuffer().copy([weights])
    weights.data = torch.zeros(3, dtype=torch.float64)
    assert torch.equal(taken.content()[0], torch.ones(1000))


def test_memory_of_numpy_that_two_tensors_share_in_part() -> None:
    array = np.arange(1000.0)
    first, second = torch.from_numpy(array[:600]), torch.from_numpy(array[400:])
    taken = HostCopyBuffer().copy([first, second])
    expected = [first.clone(), second.clone()]
    array[:] = 0
    assert all(torch.equal(one, other) for one, other in zip(taken.content(), expected, strict=True))


def test_in_and_after_inference_mode() -> None:
    buffer = HostCopyBuffer()
    with torch.inference_mode():
        weights = torch.ones(1000)
        assert torch.equal(buffer.copy([weights]).content()[0], weights)
    again = buffer.copy([torch.full((1000,), 2.0)]).content()[0]
    assert again.add_(1).unique().tolist() == [3]


def test_too_little_memory_is_an_error_and_less_is_taken_afterwards() -> None:
    buffer = HostCopyBuffer()
    vast = torch.ones(1).expand(1 << 20).as_strided((1 << 46,), (0,))
    assert buffer.copy([vast]).content()[0].untyped_storage().nbytes() == 4, "of one element there is one copy"
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    content = [torch.ones(20_000_000)]
    resource.setrlimit(resource.RLIMIT_AS, (_address_space_bytes() + (16 << 20), hard))
    try:
        with pytest.raises((MemoryError, RuntimeError)):
            buffer.copy(content)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert buffer.copy(content).content()[0].sum() == 20_000_000


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def test_what_cannot_be_pickled_fails_at_once() -> None:
    with pytest.raises((AttributeError, TypeError), match=r"pickle|local object"):
        HostCopyBuffer().copy({"hook": lambda: None})


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
        copies = region.copied_into(buffer, tensors)
        assert all(torch.equal(copy, tensors[index]) for index, copy in copies.items())


def test_what_is_more_than_bytes() -> None:
    assert has_bytes(torch.zeros(2).t())
    assert not has_bytes(torch.empty(0))
    assert not has_bytes(torch.eye(2).to_sparse())
    assert not has_bytes(torch.empty(2, device="meta"))
    assert not has_bytes(torch.zeros(2, dtype=torch.complex64).conj())
