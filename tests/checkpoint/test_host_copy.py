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
from torch.utils._pytree import tree_map
from typing_extensions import override

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


class OnGpu(Tensor):
    """A tensor that says it is on a GPU, where there is none. It knows only how it gets to the host."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnGpu:
        made: OnGpu = Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device="cuda:0"
        )
        made.held = held
        return made

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held)
        if func is torch.ops.aten._to_copy.default and kwargs["device"].type == "cpu":
            return args[0].held.clone()
        raise AssertionError(f"{func} takes memory of the GPU")


class Scaled(Tensor):
    """A wrapper as those of torchao's quantized weights and optimizer states: bytes, and the scales of their rows."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(
            cls, codes.size(), dtype=torch.float32, device=codes.device, requires_grad=False
        )
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["codes", "scale"], "rows"

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: str, size: Any, stride: Any) -> Scaled:
        assert context == "rows"
        return cls(inner["codes"], inner["scale"])

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return tree_map(lambda each: cls(func(each.codes), func(each.scale)), args[0])
        raise AssertionError(func)


def scaled(place: Any = lambda tensor: tensor) -> Scaled:
    codes = torch.arange(12, dtype=torch.uint8).view(3, 4)
    return Scaled(place(codes), place(torch.tensor([1.0, 2.0, 3.0])))


@pytest.mark.parametrize("wrap", [lambda each: each, nn.Parameter], ids=["tensor", "parameter"])
def test_a_wrapper_is_on_the_host_and_takes_no_memory_of_the_gpu(wrap: Any) -> None:
    content = {"wrapped": wrap(scaled(OnGpu)), "inside": wrap(Scaled(OnGpu(torch.ones(2, 2)), scaled()))}
    found = HostCopyBuffer().copy(content).content()
    assert [each.device.type for each in found.values()] == ["cpu", "cpu"]
    assert type(found["wrapped"]) is Scaled
    assert type(found["wrapped"].codes) is type(found["wrapped"].scale) is Tensor
    assert isinstance(found["wrapped"], nn.Parameter) == (wrap is nn.Parameter)
    assert found["wrapped"].requires_grad == (wrap is nn.Parameter)
    assert found["wrapped"].codes.flatten().tolist() == list(range(12))
    assert found["inside"].scale.codes.flatten().tolist() == list(range(12))
    assert b"cuda" not in saved(found).getvalue(), "the file loads where there is no GPU"


def test_a_subclass_that_says_nothing_of_what_it_holds_is_on_the_host() -> None:
    found = HostCopyBuffer().copy([OnGpu(torch.ones(3)), OnGpu(torch.empty(0))]).content()
    assert [(type(each), each.device.type, each.numel()) for each in found] == [(Tensor, "cpu", 3), (Tensor, "cpu", 0)]


def test_what_a_wrapper_holds_shares_memory_in_the_copy() -> None:
    codes = torch.arange(12, dtype=torch.uint8).view(3, 4)
    taken = HostCopyBuffer().copy({"whole": codes, "wrapped": Scaled(codes[1:], torch.ones(2))})
    codes.zero_()
    found = taken.content()
    assert found["wrapped"].codes.flatten().tolist() == list(range(4, 12))
    found["whole"].fill_(7)
    assert found["wrapped"].codes.unique().tolist() == [7]


def unusual() -> dict[str, Tensor]:
    """Tensors that are more than bytes, none of which shares its memory with another."""
    dense = torch.tensor([[0.0, 1.0, 0.0, 0.0], [2.0, 0.0, 0.0, 3.0]])
    layouts = {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "bsc": dense.to_sparse_bsc((2, 2)),
    }
    pieces = [torch.arange(6.0).view(2, 3), torch.ones(1, 3)]
    complexes = torch.tensor([1 + 2j, 3 - 4j])
    return {
        **layouts,
        "per tensor": torch.quantize_per_tensor(dense, 0.5, 1, torch.qint8),
        "per channel": torch.quantize_per_channel(
            dense, torch.tensor([0.5, 1.0]), torch.tensor([0, 1]), 0, torch.qint8
        ),
        "jagged": torch.nested.nested_tensor(pieces, layout=torch.jagged),
        "nested": torch.nested.nested_tensor(pieces),
        "conjugate": complexes.clone().conj(),
        "negative": complexes.clone().conj().imag,
        "both": torch._neg_view(complexes.clone().conj()),
        "parameter": nn.Parameter(complexes.clone().conj()),
    }


@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta", "ignore:.*nested tensors", "ignore:torch.quantize")
@pytest.mark.parametrize("kind", [*unusual()])
def test_unusual_tensors_are_written_as_the_original_would_have_been(kind: str) -> None:
    tensor = unusual()[kind]
    expected = torch.load(saved(tensor), weights_only=True)
    taken = HostCopyBuffer().copy([tensor])
    _overwrite(tensor)
    copy = taken.content()[0]
    found = torch.load(saved(copy), weights_only=True)
    assert type(copy) is type(tensor)
    for of in ("layout", "dtype", "is_nested", "is_quantized", "requires_grad"):
        assert getattr(found, of) == getattr(expected, of)
    assert (found.is_conj(), found.is_neg()) == (expected.is_conj(), expected.is_neg())
    assert all(map(torch.equal, _parts(found), _parts(expected)))


def _overwrite(tensor: Tensor) -> None:
    with torch.no_grad():
        if tensor.is_nested:
            tensor.values().zero_()
        elif not tensor.is_quantized:
            tensor.zero_()


def _parts(tensor: Tensor) -> list[Tensor]:
    if tensor.is_nested:
        return [*tensor.unbind()]
    return [tensor.dequantize() if tensor.is_quantized else tensor.to_dense()]


def test_a_conjugate_shares_the_memory_of_its_original() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    found = HostCopyBuffer().copy({"is": numbers, "mirrored": numbers.conj()}).content()
    found["is"].fill_(1j)
    assert found["mirrored"].tolist() == [-1j, -1j]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the tensors lie in its memory")
@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta", "ignore:.*nested tensors", "ignore:torch.quantize")
def test_unusual_tensors_of_a_gpu_are_on_the_host() -> None:
    there = {kind: tensor.detach().cuda() for kind, tensor in unusual().items()} | {"wrapped": scaled(Tensor.cuda)}
    torch.cuda.reset_peak_memory_stats()
    found = HostCopyBuffer().copy(there).content()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated(), "nothing was copied on the GPU"
    assert {kind: each.device.type for kind, each in found.items()} == dict.fromkeys(there, "cpu")
    assert b"cuda" not in saved(found).getvalue()


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
