"""Copies the state of a training into host memory, from which a background thread writes it."""

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

_ALIGNMENT = 64  # bytes, one cache line


class HostCopy:
    """A copy of a training's state, made by `HostCopyBuffer`.

    Args:
        structure: the pickled state without its tensors.
        tensors: copies of the tensors, in the order in which the pickler met them.
        gpu_done: the event that marks the end of the copies from GPUs; None without GPUs.
    """

    def __init__(self, structure: io.BytesIO, tensors: Sequence[Tensor], gpu_done: torch.cuda.Event | None) -> None:
        self._structure = structure
        self._tensors = tensors
        self._gpu_done = gpu_done

    def content(self) -> Any:
        """Return the copied state, with its tensors on the host. Any thread may call this."""
        if self._gpu_done is not None:
            self._gpu_done.synchronize()
        self._structure.seek(0)
        return _Unpickler(self._structure, self._tensors).load()


class HostCopyBuffer:
    """Memory that holds one copy at a time.

    The memory is kept for the next copy, because the system clears new memory page by page, which takes longer than
    filling it. With GPUs it is pinned, so that they write into it while the host continues.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.inference_mode(False)
    @torch.no_grad()
    def copy(self, content: Any) -> HostCopy:
        """Copy what `torch.save` would write, as it is now.

        The copy of host tensors is complete when this returns, so no later write to them reaches it. GPUs copy in the
        order of the current stream, before any work that the training queues later in this stream. Other threads of the
        user must not write to the state meanwhile.

        Everything that is not a tensor is pickled. Tensors that share memory share it in the copy. Of a view, only the
        visible part is copied.

        Args:
            content: tensors on any device, nested in any objects that can be pickled.

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
        # Tensors without memory that can be copied byte by byte, such as sparse ones.
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
        self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory first
        if torch.cuda.is_available():
            with suppress(RuntimeError):  # too little memory can be pinned: copies from the GPU take longer
                self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                return
        self._memory = torch.from_numpy(np.empty(size, dtype=np.uint8))  # numpy asks for huge pages


@dataclass
class Region:
    """A gapless range of memory that some tensors lie in, and the place of its copy.

    Attributes:
        tensor: a tensor that begins at the start of the region.
        address: address of the first byte.
        size: bytes.
        target: offset of the copy in the buffer, in bytes.
        members: indices of the tensors that lie in the region.
    """

    tensor: Tensor
    address: int
    size: int
    target: int
    members: list[int]

    def copied_into(self, buffer: Tensor, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Copy the region into the buffer, without waiting for a GPU.

        Returns:
            The copies of the tensors that lie in the region, by their index.
        """
        copy = buffer[self.target : self.target + self.size]
        if self.tensor.device.type == "cpu":
            # torch's copy would use threads: they gain little, and on busy cores they wait for one another at each
            # region. memmove takes an address, as overlapping tensors may belong to storages none of which covers the
            # whole region.
            ctypes.memmove(copy.data_ptr(), self.address, self.size)
        else:
            source = torch.empty(0, dtype=torch.uint8, device=self.tensor.device)
            storage = self.tensor.untyped_storage()
            source.set_(storage, self.address - storage.data_ptr(), (self.size,), (1,))
            copy.copy_(source, non_blocking=self.tensor.is_cuda)
        base = torch.from_numpy(copy.numpy())  # a storage of its own, as torch.save writes each storage whole and once
        return {index: self._view(tensors[index], base) for index in self.members}

    def _view(self, tensor: Tensor, base: Tensor) -> Tensor:
        start = tensor.data_ptr() - self.address
        return base[start : start + span(tensor)].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def span(tensor: Tensor) -> int:
    """Bytes from the first element to the last, including any gaps."""
    if tensor.is_contiguous():
        return tensor.nbytes
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in strides)) * tensor.element_size()


def lay_out(tensors: Sequence[Tensor]) -> list[Region]:
    """Find the regions that tensors lie in, and give each a place in one buffer. Overlapping tensors share a region."""
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
    """Size of the buffer. It does not depend on the order in which the tensors' memory was allocated."""
    if not regions:
        return 0
    last = regions[-1]
    return last.target + -(-last.size // _ALIGNMENT) * _ALIGNMENT


def has_bytes(tensor: Tensor) -> bool:
    """Tell whether a tensor is only a view of bytes: not empty, sparse, quantized, on the meta device or a subclass."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.numel() > 0
    return plain and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _local_part(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _like(source: Tensor, copy: Tensor) -> Tensor:
    """Give the copy the type of its source."""
    if isinstance(source, DTensor):
        # `from_local` would move the copy to the devices of the mesh.
        copy = DTensor(copy, source._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    if type(source) is nn.Parameter:
        return nn.Parameter(copy, requires_grad=source.requires_grad)
    return copy.requires_grad_(source.requires_grad)


class _Pickler(pickle.Pickler):
    """Leaves tensors out of the pickle and collects them in a list."""

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
    """Puts the copies in the places of the tensors."""

    def __init__(self, file: io.BytesIO, copies: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._copies = copies

    @override
    def persistent_load(self, pid: int) -> Tensor:
        return self._copies[pid]
