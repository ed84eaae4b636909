"""The state of a training as it is now, copied into memory that is used again for the next copy."""

from __future__ import annotations

import io
import logging
import pickle
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from azureml_strategy.checkpoint.memory import Ranges, Region, has_bytes, lay_out, needed_bytes, span

log = logging.getLogger(__name__)

# What is smaller is copied at once: it takes no longer than to see to it later.
_AT_ONCE_BYTES = 1 << 16


class SnapshotError(RuntimeError):
    """A copy that mixes two states."""


class Snapshot:
    """A copy of a training's state; made by `SnapshotBuffers`."""

    def __init__(
        self,
        structure: io.BytesIO,
        tensors: Sequence[Tensor],
        locals_: Sequence[Tensor],
        regions: Sequence[Region],
        memory: Tensor,
    ) -> None:
        self._structure = structure
        self._tensors = tensors
        self._locals = locals_
        self._regions = regions
        self._memory = memory
        # what lies in no memory that could be copied byte by byte, such as a sparse tensor
        self._others = {i: each.clone() for i, each in enumerate(locals_) if not has_bytes(each)}
        self._left: list[Region] = []
        self._versions: list[tuple[Tensor, int]] = []
        self._lock = threading.Lock()
        self._torn = False
        self._on_gpu: torch.cuda.Event | None = None

    def copy(self, later: Sequence[Region] = ()) -> None:
        """Copy all but what may be copied later, by `complete`."""
        waiting = {id(region) for region in later}
        for region in self._regions:
            if id(region) not in waiting:
                region.copy_into(self._memory)
        if any(region.tensor.is_cuda for region in self._regions):
            self._on_gpu = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._on_gpu.record()
        members = [self._locals[index] for region in later for index in region.members]
        self._versions = [(each, each._version) for each in members]
        self._left = list(later)

    def complete(self) -> bool:
        """Copy what is left, on whichever thread comes first; False if something changed meanwhile."""
        with self._lock:
            while self._left:
                self._left[-1].copy_into(self._memory)  # may be interrupted: then it is still left
                self._left.pop()
            self._torn |= any(tensor._version != version for tensor, version in self._versions)
            self._versions = []
            return not self._torn

    def equals_now(self, regions: Sequence[Region]) -> bool:
        """Whether memory of the host is as it was when it was copied."""
        return all(region.equals(self._memory) for region in regions)

    def content(self) -> Any:
        """What was copied, with tensors on the host; on any thread.

        Raises:
            SnapshotError: something changed what was to stay until the next step.
        """
        if not self.complete():
            raise SnapshotError("parameters changed between two optimizer steps while they were copied")
        if self._on_gpu is not None:
            self._on_gpu.synchronize()
        copies = dict(self._others)
        for region in self._regions:
            # a storage for each: torch.save writes storages as a whole, and each once
            base = torch.from_numpy(self._memory.numpy()[region.target : region.target + region.size])
            copies |= {index: _view(self._locals[index], region, base) for index in region.members}
        self._structure.seek(0)
        return _Unpickler(self._structure, [_like(each, copies[i]) for i, each in enumerate(self._tensors)]).load()


class SnapshotBuffers:
    """Memory for one snapshot at a time.

    New memory for each checkpoint would take longer than the copy: the system hands it out page by page, and clears
    it. It is pinned where there are GPUs, which then write into it while the host goes on.

    Memory of the host that only optimizer steps change need not be copied before the next one: training goes on, and
    `settle` waits where the copy takes longer than the forward and backward pass. That nothing else changes it is not
    taken for granted. The first snapshot on each occasion is copied at once and compared before the next step; and
    torch counts the changes of each tensor, so that one in the middle of a copy is seen.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._steady: dict[str, bool] = {}
        self._last: tuple[Snapshot, str, Sequence[Region]] | None = None

    @torch.no_grad()
    def take(self, content: Any, held: Iterable[Tensor] = (), occasion: str = "") -> Snapshot:
        """Copy what `torch.save` would write, as it is now.

        What is not a tensor is pickled. Tensors that share memory share it in the copy, and of a view only what it
        shows is copied.

        Args:
            content: tensors on any device, nested at will in objects that can be pickled.
            held: tensors that nothing but an optimizer step should change.
            occasion: where in the loop this is, as far as that decides on what runs until the next step.

        Returns:
            The copy, valid until the next one is taken; call `settle` before the next optimizer step.
        """
        structure = io.BytesIO()
        pickler = _Pickler(structure)
        pickler.dump(content)
        locals_ = [_local(each) for each in pickler.tensors]
        regions = lay_out(locals_)
        self._reserve(needed_bytes(regions))
        snapshot = Snapshot(structure, pickler.tensors, locals_, regions, self._memory)
        ranges = Ranges(_local(each) for each in held)
        held_regions = [each for each in regions if each.size >= _AT_ONCE_BYTES and each.on_host and each in ranges]
        snapshot.copy(later=held_regions if self._steady.get(occasion) else ())
        self._last = (snapshot, occasion, held_regions)
        return snapshot

    def settle(self, trained: bool = True) -> None:
        """Have what is left of the last snapshot copied; before the optimizer changes it.

        Args:
            trained: whether a forward pass has come since, which might have changed something.
        """
        if self._last is None:
            return
        snapshot, occasion, held_regions = self._last
        self._last = None
        if not snapshot.complete():
            self._copy_at_once(occasion)
        elif trained and held_regions and occasion not in self._steady:
            self._steady[occasion] = True
            if not snapshot.equals_now(held_regions):
                self._copy_at_once(occasion)

    def _copy_at_once(self, occasion: str) -> None:
        if self._steady.get(occasion) is not False:
            log.info("Something changes parameters between two steps: checkpoints (%s) are copied at once.", occasion)
        self._steady[occasion] = False

    def _reserve(self, size: int) -> None:
        if self._memory.numel() >= size:
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # give the old one back first
        if torch.cuda.is_available():
            with suppress(RuntimeError):  # no memory that could be pinned: then copies from the GPU take longer
                self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                return
        self._memory = torch.from_numpy(np.empty(size, dtype=np.uint8))  # numpy asks for huge pages


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor; an object of our own, which stays where it is if `tensor.data` is replaced."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _view(source: Tensor, region: Region, base: Tensor) -> Tensor:
    """A tensor like another one, in the copy of its region."""
    start = source.data_ptr() - region.address if source.numel() else 0
    bytes_of_it = base[start : start + span(source)]
    return bytes_of_it.view(source.dtype).as_strided(source.shape, source.stride())


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
