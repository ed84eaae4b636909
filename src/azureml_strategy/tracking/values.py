"""Metric values that can be read later, on another thread."""

from __future__ import annotations

from typing import Any

import torch


class DeviceValue:
    """A number that a GPU may still be computing.

    Taking it queues a copy behind the work that makes it and returns at once.

    Args:
        tensor: has one element and lies on a CUDA device; the caller may change it in place afterwards.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.detach().clone()
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def __float__(self) -> float:
        self._copied.synchronize()
        return float(self._copy)


def readable_later(value: Any) -> Any:
    """The value itself, or for a tensor something whose `float()` neither waits here nor changes until then."""
    if not isinstance(value, torch.Tensor):
        return value
    return DeviceValue(value) if value.is_cuda else value.item()
