"""Results on their way from the device, read when they have come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Transfer:
    """Copies tensors to the host while the device goes on.

    Args:
        tensors: small ones.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # Only CUDA has an event that tells when such a copy is there.
        self._copies = [each.to("cpu", non_blocking=each.is_cuda) for each in tensors]
        self._events: list[torch.cuda.Event] = []
        for device in {each.device for each in tensors if each.is_cuda}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def is_ready(self) -> bool:
        """Whether the device has come so far."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def values(self) -> list[list[Any]]:
        """What the tensors hold, in their order; waits for the device unless `is_ready`."""
        for event in self._events:
            event.synchronize()
        return [each.tolist() for each in self._copies]
