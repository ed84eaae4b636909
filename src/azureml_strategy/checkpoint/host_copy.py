"""Copies the state of a training into host memory, from which a background thread writes it."""

from __future__ import annotations

import ctypes
import io
import logging
import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

log = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes, one cache line
# cudaHostRegisterPortable: pinned for all GPUs of the process, not only for the current one.
_PORTABLE = 1


class HostCopy:
    """A copy of a training's state, made by `HostCopyBuffer`.

    Args:
        structure: the pickled state without its tensors.
        tensors: copies of the tensors, in the order of the pickler.
        gpus_done: one event for each GPU, which marks the end of its copies.
    """

    def __init__(self, structure: io.BytesIO, tensors: Sequence[Tensor], gpus_done: Sequence[torch.cuda.Event]) -> None:
        self._structure = structure
        self._tensors = tensors
        self._gpus_done = gpus_done

    def content(self) -> Any:
        """Return the copied state, with its tensors on the host. Any thread may call this."""
        for event in self._gpus_done:
            event.synchronize()
        self._structure.seek(0)
        return TensorUnpickler(self._structure, self._tensors).load()


class HostCopyBuffer:
    """Memory that holds one copy at a time.

    The memory is kept for the next copy, because the system clears new memory page by page, which takes longer than
    filling it. With GPUs it is pinned, so that they write into it while the host continues.
    """

    def __init__(self) -> None:
        self._memory = HostMemory()

    @torch.inference_mode(False)
    @torch.no_grad()
    def copy(self, content: Any) -> HostCopy:
        """Copy what `torch.save` would write, as it is now, but with all tensors on the host.

        The copy of host tensors is complete when this returns, so no later write to them reaches it. GPUs copy in the
        order of the current stream, before any work that the training queues later in this stream. Other threads of the
        user must not write to the state meanwhile.

        Everything that is not a tensor is pickled. Tensors that share memory share it in the copy. Of a view, only the
        visible part is copied. Of a wrapper around other tensors, such as a DTensor, those are copied. Sparse and
        quantized tensors, and subclasses that say nothing of what they hold, are copied while the host waits.

        Args:
            content: tensors on any device, nested in any objects that can be pickled. Tensors on `meta` stay there.

        Returns:
            The copy, valid until the next one is made.

        Raises:
            MemoryError, OSError, RuntimeError: the host has too little memory.
            pickle.PicklingError, TypeError, AttributeError: something cannot be pickled.
        """
        structure = io.BytesIO()
        pickler = TensorPickler(structure)
        pickler.dump(content)
        sources: list[Tensor] = []
        makers = [_take_apart(each, sources) for each in pickler.tensors]
        regions = lay_out(sources)
        self._memory.reserve(needed_bytes(regions))
        # A clone of a tensor that is more than bytes. On a GPU it takes no memory.
        copies = {
            i: each.clone() if each.device.type in ("cpu", "meta") else each.cpu()
            for i, each in enumerate(sources)
            if not has_bytes(each)
        }
        for region in regions:
            copies |= region.copied_into(self._memory.bytes, sources)
        gpus_done = _events([region.tensor.device for region in regions if region.tensor.is_cuda])
        self._memory.filled_by(gpus_done)
        return HostCopy(structure, [make(copies) for make in makers], gpus_done)


class HostMemory:
    """Bytes on the host. With GPUs their pages are pinned, so that a GPU writes into them by itself.

    The pages of ordinary memory are registered with CUDA. torch's own pinned memory would take up to twice as much, as
    its allocator rounds each block up to a power of two, and it would keep the blocks that were freed.

    The pages are released before their memory is freed, whatever frees it: growth, the end of the last copy that lies
    in it, an exception, or the end of the process.

    Attributes:
        bytes: the memory, as a tensor.
    """

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._writers: list[torch.cuda.Event] = []

    def reserve(self, size: int) -> None:
        """Have at least this many bytes, which nobody writes into any more. Those that were there may be lost.

        Args:
            size: in bytes.

        Raises:
            MemoryError, OSError, RuntimeError: the host has too little memory.
        """
        for event in self._writers:
            event.synchronize()
        if self.bytes.numel() >= size:
            return
        self.bytes = torch.empty(0, dtype=torch.uint8)  # free the old memory first
        if torch.cuda.is_available():
            self._writers = []
            self.bytes = torch.from_numpy(_pinned(size, self._writers))
        else:
            self.bytes = torch.from_numpy(np.empty(size, dtype=np.uint8))  # numpy asks for huge pages

    def filled_by(self, events: Sequence[torch.cuda.Event]) -> None:
        """Note after which events GPUs have written into the memory. It is neither freed nor used again before."""
        self._writers[:] = events


def _pinned(size: int, writers: list[torch.cuda.Event]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Whole pages that GPUs can write into by themselves; ordinary ones, with a warning, if CUDA cannot pin them.

    Processes that are forked later, such as those of a DataLoader, share the pages. A kernel copies private pages that
    are pinned for each of them.

    Args:
        size: in bytes.
        writers: what to wait for before the pages are released.
    """
    pages = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    memory = np.frombuffer(pages, dtype=np.uint8)
    try:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # in a process that was forked after CUDA was used, and trains on its CPU
        log.warning("CUDA cannot pin host memory here (%s), so that training waits longer for a checkpoint.", error)
        return memory
    status = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)
    if int(status) == 0:
        # An array calls this before it lets go of its memory. A mapping would call it afterwards.
        weakref.finalize(memory, _release, memory.ctypes.data, torch.cuda.current_device(), os.getpid(), writers)
        return memory
    log.warning(
        "CUDA cannot pin %s bytes of host memory (%s), so that training waits longer for the copy of a checkpoint. "
        "Raise the limit of locked memory (ulimit -l), or take a node with more memory.",
        f"{memory.nbytes:,}",
        cudart.cudaGetErrorString(status),
    )
    with suppress(RuntimeError):  # torch reports the error at its next kernel, and clears it only by that
        torch.ones(1, device="cuda")
    return memory


def _release(address: int, device: int, process: int, writers: Sequence[torch.cuda.Event]) -> None:
    """Give pages back to the system, before their memory is freed."""
    if os.getpid() != process:
        return  # a forked child has pinned nothing, and cannot use CUDA
    with suppress(RuntimeError):  # a GPU that has failed writes no more
        for event in writers:
            event.synchronize()
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):  # a thread that has not used CUDA yet would start it on the first GPU
        status = cudart.cudaHostUnregister(address)
    if int(status) != 0:
        reason = cudart.cudaGetErrorString(status)
        log.warning("The host memory of a checkpoint's copy stays pinned until this process ends: %s", reason)


def _events(devices: Sequence[torch.device]) -> list[torch.cuda.Event]:
    """Mark what was queued so far on the current stream of each GPU."""
    events = []
    for device in dict.fromkeys(devices):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events


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
        views = {}
        for index in self.members:
            tensor = tensors[index]
            start = tensor.data_ptr() - self.address
            flat = base[start : start + span(tensor)].view(tensor.dtype)
            views[index] = flat.as_strided(tensor.shape, tensor.stride())
        return views


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
    """Tell whether a tensor is only a view of bytes.

    One that is empty, sparse, quantized, nested, on the meta device or of a subclass is not, nor one with a conjugate
    or negative bit.
    """
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested
    bits = tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return plain and not bits and tensor.numel() > 0


def _take_apart(tensor: Tensor, sources: list[Tensor]) -> Callable[[Mapping[int, Tensor]], Tensor]:
    """Find the tensors that hold the values of a tensor.

    Args:
        tensor: of any kind.
        sources: they are added to this list.

    Returns:
        Makes the like of the tensor on the host, from copies by their index in `sources`.
    """
    if hasattr(type(tensor), "__tensor_flatten__"):  # torch's protocol for wrappers of other tensors
        return _unwrap(tensor, sources)
    memory, conjugate, negative = tensor.detach(), tensor.is_conj(), tensor.is_neg()
    memory = memory.conj() if conjugate else memory  # without the bit, the same bytes
    memory = torch._neg_view(memory) if negative else memory
    index = len(sources)
    sources.append(memory)

    def make(copies: Mapping[int, Tensor]) -> Tensor:
        copy = copies[index]
        copy = torch._neg_view(copy) if negative else copy
        copy = copy.conj() if conjugate else copy
        if type(tensor) is nn.Parameter:
            return nn.Parameter(copy, requires_grad=tensor.requires_grad)
        return copy.requires_grad_(tensor.requires_grad)

    return make


def _unwrap(tensor: Any, sources: list[Tensor]) -> Callable[[Mapping[int, Tensor]], Tensor]:
    names, context = tensor.__tensor_flatten__()
    held = {name: getattr(tensor, name) for name in names}  # a DTensor holds its mesh, too
    makers = {name: _take_apart(each, sources) for name, each in held.items() if isinstance(each, Tensor)}

    def make(copies: Mapping[int, Tensor]) -> Tensor:
        inner = held | {name: make_part(copies) for name, make_part in makers.items()}
        copy: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copy, requires_grad=tensor.requires_grad)
        return copy.requires_grad_(tensor.requires_grad)

    return make


class TensorPickler(pickle.Pickler):
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


class TensorUnpickler(pickle.Unpickler):
    """Puts the copies in the places of the tensors."""

    def __init__(self, file: io.BytesIO, copies: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._copies = copies

    @override
    def persistent_load(self, pid: int) -> Tensor:
        return self._copies[pid]
