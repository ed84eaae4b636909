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
# cudaHostRegisterPortable: the memory is pinned for all GPUs of the process, not only for the current one.
_PORTABLE = 1


@dataclass(frozen=True, eq=False, repr=False)
class HostCopy:
    """A copy of a training's state, made by `HostCopyBuffer`: the pickled state without its tensors, and their copies.

    An event for each GPU marks the end of its copies.
    """

    structure: io.BytesIO
    tensors: Sequence[Tensor]
    gpus_done: Sequence[torch.cuda.Event]

    def content(self) -> Any:
        """Return the copied state, with its tensors on the host. Any thread may call this."""
        for event in self.gpus_done:
            event.synchronize()
        self.structure.seek(0)
        return TensorUnpickler(self.structure, self.tensors).load()


class HostCopyBuffer:
    """Memory that holds one copy at a time.

    The memory is kept for the next copy, because the system clears new memory page by page, which takes longer than
    filling it. With GPUs its pages are pinned, so that they write into it while the host continues. For that, ordinary
    pages are registered with CUDA. torch's own pinned memory would take up to twice as much, because its allocator
    rounds each block up to a power of two and keeps the blocks that were freed.

    The pages are unregistered before their memory is freed, whatever frees it: growth, the end of the last copy that
    lies in it, an exception, or the end of the process.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._writers: list[torch.cuda.Event] = []  # after these, GPUs have written into the memory

    @torch.inference_mode(False)
    @torch.no_grad()
    def copy(self, content: Any) -> HostCopy:
        """Copy what `torch.save` would write, as it is now, but with all tensors on the host.

        The copy of host tensors is complete when this returns, so no later write to them reaches it. GPUs copy in the
        order of the current stream, before any work that the training queues later in this stream. Other threads of the
        user must not write to the state meanwhile. The copy is valid until the next one is made.

        The tensors may be on any device, and are nested in objects that can be pickled. Everything that is not a tensor
        is pickled. Tensors that share memory share it in the copy. Of a view, only the visible part is copied. Of a
        wrapper around other tensors, such as a DTensor, the inner tensors are copied. Sparse and quantized tensors, and
        subclasses that do not name their inner tensors, are copied while the host waits. Those on `meta` stay there.

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
        self._reserve(needed_bytes(regions))
        # A tensor that is not a view of bytes is cloned on the host, which takes no memory of its GPU.
        copies = {
            i: each.clone() if each.device.type in ("cpu", "meta") else each.cpu()
            for i, each in enumerate(sources)
            if not has_bytes(each)
        }
        for region in regions:
            copies |= region.copied_into(self._bytes, sources)
        gpus_done = _events([region.tensor.device for region in regions if region.tensor.is_cuda])
        self._writers[:] = gpus_done
        return HostCopy(structure, [make(copies) for make in makers], gpus_done)

    def _reserve(self, size: int) -> None:
        """Have at least this many bytes, into which no GPU writes any more. The old content may be lost.

        Raises:
            MemoryError, OSError, RuntimeError: the host has too little memory.
        """
        for event in self._writers:
            event.synchronize()
        if self._bytes.numel() >= size:
            return
        self._bytes = torch.empty(0, dtype=torch.uint8)  # free the old memory first
        if torch.cuda.is_available():
            self._writers = []
            self._bytes = torch.from_numpy(_pinned(size, self._writers))
        else:
            self._bytes = torch.from_numpy(np.empty(size, dtype=np.uint8))  # numpy asks for huge pages


def _pinned(size: int, writers: list[torch.cuda.Event]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Whole pages that GPUs can write into by themselves; ordinary pages, with a warning, if CUDA cannot pin them.

    The mapping is shared, so that processes that are forked later, such as those of a DataLoader, share its pages. The
    kernel would copy private pages that are pinned for each of them. The pages are released after the writers' events.
    """
    pages = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    memory = np.frombuffer(pages, dtype=np.uint8)
    try:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # this process was forked after CUDA was used, and trains on its CPU
        log.warning("CUDA cannot pin host memory here (%s), so that training waits longer for a checkpoint.", error)
        return memory
    status = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)
    if int(status) == 0:
        # The finalizer of an array is called before its memory is freed, that of a mapping afterwards.
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
    with torch.cuda.device(device):  # otherwise a thread that has not used CUDA yet would start it on the first GPU
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
        tensor: one that begins at the start of the region.
        address: of the first byte.
        size: in bytes.
        target: offset of the copy in the buffer, in bytes.
        members: indices of the tensors that lie in the region.
    """

    tensor: Tensor
    address: int
    size: int
    target: int
    members: list[int]

    def copied_into(self, buffer: Tensor, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Copy the region into the buffer, without waiting for a GPU, and return its tensors' copies by their index."""
        copy = buffer[self.target : self.target + self.size]
        if self.tensor.device.type == "cpu":
            # torch's copy would use threads. They gain little, and on busy cores they wait for one another at each
            # region. memmove takes an address: no storage of overlapping tensors need cover the whole region.
            ctypes.memmove(copy.data_ptr(), self.address, self.size)
        else:
            source = torch.empty(0, dtype=torch.uint8, device=self.tensor.device)
            storage = self.tensor.untyped_storage()
            source.set_(storage, self.address - storage.data_ptr(), (self.size,), (1,))
            copy.copy_(source, non_blocking=self.tensor.is_cuda)
        # The region gets a storage of its own, because torch.save writes each storage whole and once.
        base = torch.from_numpy(copy.numpy())
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
    """Whether a tensor is only a view of bytes.

    An empty, sparse, quantized or nested tensor is not, nor one on the meta device, of a subclass, or with a conjugate
    or negative bit.
    """
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested
    bits = tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return plain and not bits and tensor.numel() > 0


def _take_apart(tensor: Tensor, sources: list[Tensor]) -> Callable[[Mapping[int, Tensor]], Tensor]:
    """Add the tensors that hold the values of a tensor to the sources.

    Returns:
        A function that makes the like of the tensor on the host, from copies by their index in the sources.
    """
    if hasattr(type(tensor), "__tensor_flatten__"):  # torch's protocol for wrappers of other tensors
        return _unwrap(tensor, sources)
    memory, conjugate, negative = tensor.detach(), tensor.is_conj(), tensor.is_neg()
    memory = memory.conj() if conjugate else memory  # the same bytes, without the bit
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
    held = {name: getattr(tensor, name) for name in names}  # not only tensors: a DTensor also holds its mesh
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
