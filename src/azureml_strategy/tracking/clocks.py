"""Moments in a training step, taken without ever making the host wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes moments now and says later how far apart they were."""

    def now(self) -> Any:
        """A moment."""

    def has_passed(self, moment: Any) -> bool:
        """Whether the moment is reached, so that it can be measured."""

    def wait_for(self, moment: Any) -> None:
        """Return when the moment is reached."""

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two moments that have passed."""


class HostClock:
    """Moments of the host: right where the host does the work, as on a CPU.

    Args:
        read: a monotonic clock, in seconds.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        self.now = read

    def has_passed(self, moment: float) -> bool:
        """Always: it was read from the clock."""
        return True

    def wait_for(self, moment: float) -> None:
        """Nothing to wait for."""

    def seconds(self, start: float, end: float) -> float:
        """Their difference."""
        return end - start


class CudaClock:
    """Moments of the GPU's current stream, as CUDA events.

    The host queues work far ahead of the GPU, so its own clock says little about a step. An event costs a few
    microseconds to record and nothing waits for it; it is read once the GPU has come past it.
    """

    def now(self) -> torch.cuda.Event:
        """An event behind everything queued so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def has_passed(self, moment: torch.cuda.Event) -> bool:
        """Whether the GPU has come past the event; does not wait."""
        return bool(moment.query())  # type: ignore[no-untyped-call]

    def wait_for(self, moment: torch.cuda.Event) -> None:
        """Make the host wait for the event."""
        moment.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Time on the GPU between two events; CUDA gives milliseconds with a resolution of about 0.5 us."""
        return float(start.elapsed_time(end)) / 1e3
