"""Bytes of tensors: where they lie, and copying them without Python's lock."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_ALIGNMENT = 64  # a line of the cache


@dataclass
class Region:
    """Memory without a gap that some tensors lie in, and the place of its copy.

    Attributes:
        tensor: one that begins at its start.
        address: of its first byte.
        size: bytes.
        target: where the copy begins, in bytes from the start of the buffer.
        members: which of the tensors lie in it, by their index.
    """

    tensor: Tensor
    address: int
    size: int
    target: int
    members: list[int]

    @property
    def on_host(self) -> bool:
        """Whether the CPU reads it."""
        return self.tensor.device.type == "cpu"

    def copy_into(self, buffer: Tensor) -> None:
        """Copy it; from a GPU without waiting for it."""
        if self.on_host:
            ctypes.memmove(buffer.data_ptr() + self.target, self.address, self.size)
        else:
            source = torch.empty(0, dtype=torch.uint8, device=self.tensor.device)
            storage = self.tensor.untyped_storage()
            source.set_(storage, self.address - storage.data_ptr(), (self.size,), (1,))
            buffer[self.target : self.target + self.size].copy_(source, non_blocking=True)

    def equals(self, buffer: Tensor) -> bool:
        """Whether memory of the host has the bytes of its copy."""
        return int(_compare(buffer.data_ptr() + self.target, self.address, self.size)) == 0


class Ranges:
    """Ranges of the host's memory.

    Args:
        tensors: that lie in them.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = sorted((each.data_ptr(), each.data_ptr() + span(each)) for each in tensors if has_bytes(each))
        self._starts = [start for start, _ in found]
        self._ends: list[int] = []
        for _, end in found:  # the furthest end of those that begin no later
            self._ends.append(max(end, self._ends[-1]) if self._ends else end)

    def __contains__(self, region: Region) -> bool:
        before = bisect_right(self._starts, region.address)
        return before > 0 and region.address + region.size <= self._ends[before - 1]


def span(tensor: Tensor) -> int:
    """Bytes from the first element to the last, whatever lies between them."""
    if tensor.is_contiguous():
        return tensor.nbytes
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in strides)) * tensor.element_size()


def lay_out(tensors: Sequence[Tensor]) -> list[Region]:
    """The regions that tensors lie in, each with a place in one buffer; tensors that overlap are in one region."""
    places = sorted(
        (each.get_device(), each.data_ptr(), index) for index, each in enumerate(tensors) if has_bytes(each)
    )
    regions: list[Region] = []
    for _, address, index in places:
        tensor, size = tensors[index], span(tensors[index])
        last = regions[-1] if regions else None
        if last is not None and last.tensor.device == tensor.device and address < last.address + last.size:
            last.size = max(last.size, address + size - last.address)
            last.members.append(index)
        else:
            target = needed_bytes(regions)
            regions.append(Region(tensor, address, size, target, [index]))
    return regions


def needed_bytes(regions: Sequence[Region]) -> int:
    """How large the buffer has to be: the same in whatever order memory was handed out."""
    if not regions:
        return 0
    last = regions[-1]
    return last.target + -(-last.size // _ALIGNMENT) * _ALIGNMENT


def has_bytes(tensor: Tensor) -> bool:
    """Whether a tensor is no more than some bytes and how to look at them: not empty, sparse or of a subclass."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and tensor.numel() > 0
    return plain and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
