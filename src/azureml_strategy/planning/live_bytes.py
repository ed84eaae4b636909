"""Counts the bytes of the tensors that operations make, as long as they live."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages, each once, while it is active. Tensors from before count only if an operation returns them.

    Attributes:
        bytes: of what lives now.
        gradients: bytes that the caller has taken out, and wants to see beside.
        peak: the most that lived at once since `begin`.
        with_gradients: the most of both together.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.gradients = self.peak = self.with_gradients = 0
        self._known = weakref.WeakKeyDictionary[Any, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for each in tree_leaves(output):
            if isinstance(each, Tensor):
                self._count(each.untyped_storage())
        return output

    def ignore(self, tensor: Tensor) -> None:
        """Leave a tensor out that is no activation."""
        self._known[tensor.untyped_storage()] = 0

    def begin(self) -> None:
        """Begin anew with the peaks."""
        self.peak, self.with_gradients = self.bytes, self.bytes + self.gradients

    def _count(self, storage: Any) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        self.bytes += size
        weakref.finalize(storage, self._free, size)
        self.peak = max(self.peak, self.bytes)
        self.with_gradients = max(self.with_gradients, self.bytes + self.gradients)

    def _free(self, size: int) -> None:
        self.bytes -= size
