"""The state of a training at one moment, copied into the host's memory, from which a thread then writes it."""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

_ALIGNMENT = 64  # bytes of a cache line


class HostCopy:
    """A copy of a training's state; made by `HostCopyBuffer`.

    Args:
        structure: the pickled state, without its tensors.
        tensors: their copies, in the order in which they were met.
        gpu_done: when what GPUs copy will have arrived; None without them.
    """

    def __init__(self, structure: io.BytesIO, tensors: Sequence[Tensor], gpu_done: torch.cuda.Event | None) -> None:
        self._structure = structure
        self._tensors = tensors
        self._gpu_done = gpu_done

    def content(self) -> Any:
        """What was copied, with its tensors on the host; on any thread."""
        if self._gpu_done is not None:
            self._gpu_done.synchronize()
        self._structure.seek(0)
        return _Unpickler(self._structure, self._tensors).load()


class HostCopyBuffer:
    """Memory for one copy at a time.

    It is kept for the next copy: the system clears new memory page by page, which takes longer than to fill it. It is
    pinned where there are GPUs, which then write into it while the host goes on.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.inference_mode(False)
    @torch.no_grad()
    def copy(self, content: Any) -> HostCopy:
        """Copy what `torch.save` would write, as it is now.

        The copy is complete before control returns to the training: no later write to a tensor of the host reaches it,
        however it is made. GPUs copy in the order of the current stream, before anything that the training asks of
        them afterwards in this stream. Other threads of the user's must not write meanwhile.

        What is not a tensor is pickled. Tensors that share memory share it in the copy, and of a view only what it
        shows is copied.

        Args:
            content: tensors on any device, nested at will in objects that can be pickled.

        Returns:
            The copy, valid until the next one is made.

        Raises:
            MemoryError, RuntimeError: the host has too little memory.
            pickle.PicklingError, TypeError, AttributeError: something cannot be pickled.
        """
        structure = io.BytesIO()
        pickler = _Pickler(structure)
        pickler.dump(content)
        sources = [_local_part(each) for each in pickler.tensors]
        regions = lay_out(sources)
        self._reserve(needed_bytes(regions))
        # what lies in no memory that could be copied byte by byte, such as a sparse tensor
        copies = {i: each.clone() for i, each in enumerate(sources) if not has_bytes(each)}
        for region in regions:
            copies |= region.copied_into(self._memory, sources)
        gpu_done = None
        if any(each.is_cuda for each in sources):
            gpu_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            gpu_done.record()
        return HostCopy(structure, [_like(each, copies[i]) for i, each in enumerate(pickler.tensors)], gpu_done)

    def _reserve(self, size: int) -> None:
        if self._memory.numel() >= size:
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # give the old one back first
        if torch.cuda.is_available():
            with suppress(RuntimeError):  # no memory that could be pinned: then copies from the GPU take longer
                self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                return
        self._memory = torch.from_numpy(np.empty(size, dtype=np.uint8))  # numpy asks for huge pages


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

    def copied_into(self, buffer: Tensor, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Copy it; from a GPU without waiting for it.

        Returns:
            The copies of the tensors that lie in it, by their index.
        """
        copy = buffer[self.target : self.target + self.size]
        if self.tensor.device.type == "cpu":
            # Not by torch's threads: they gain little, and on busy cores wait for one another at each region. And by
            # the address, as tensors that overlap may belong to storages of which none has all of the region.
            ctypes.memmove(copy.data_ptr(), self.address, self.size)
        else:
            source = torch.empty(0, dtype=torch.uint8, device=self.tensor.device)
            storage = self.tensor.untyped_storage()
            source.set_(storage, self.address - storage.data_ptr(), (self.size,), (1,))
            copy.copy_(source, non_blocking=self.tensor.is_cuda)
        base = torch.from_numpy(copy.numpy())  # a storage of its own: torch.save writes each as a whole, and once
        return {index: self._view(tensors[index], base) for index in self.members}

    def _view(self, tensor: Tensor, base: Tensor) -> Tensor:
        start = tensor.data_ptr() - self.address
        return base[start : start + span(tensor)].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


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
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.numel() > 0
    return plain and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _like(source: Tensor, copy: Tensor) -> Tensor:
    """The copy as whatever its source is."""
    if isinstance(source, DTensor):
        # not by `from_local`, which would move the copy to the devices of the mesh
        copy = DTensor(copy, source._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    if type(source) is nn.Parameter:
        return nn.Parameter(copy, requires_grad=source.requires_grad)
    return copy.requires_grad_(source.requires_grad)


class _Pickler(pickle.Pickler):
    """Leaves out tensors, and keeps a list of them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    @override
    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)
        return number


class _Unpickler(pickle.Unpickler):
    """Puts copies in the places of the tensors."""

    def __init__(self, file: io.BytesIO, copies: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._copies = copies

    @override
    def persistent_load(self, pid: int) -> Tensor:
        return self._copies[pid]
