"""A GPU whose timeline is known: a host launches kernels into its queue, and the GPU runs them in order.

What CUDA does, as far as a clock on the host and events in a stream can see: a launch costs the host some microseconds,
the kernel starts a little later or when the one before is done, the driver queues about a thousand launches and makes
the host wait for a place beyond that, and an event has the time at which the GPU has done all that was queued before.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class NotReachedError(RuntimeError):
    """CUDA's answer to the time between events of which one has not been reached."""


class Event(NamedTuple):
    """A moment in the queue, in seconds."""

    at: float


class GpuQueue:
    """The host's clock, the queue and all kernels of one GPU. It is a `Clock`.

    Args:
        latency_s: from a launch to the start of its kernel on an idle GPU.
        gap_s: between two kernels that are both queued.
        depth: launches that the driver queues.
        hz: cycles a second of the GPU; it may change later.
        load_s: of the host, to load the kernel that spins, before its first launch.
    """

    def __init__(
        self,
        latency_s: float = 4e-6,
        gap_s: float = 0.5e-6,
        depth: int = 1024,
        hz: float = 1.755e9,
        load_s: float = 0.0,
    ) -> None:
        self.host = 0.0
        self.kernels: list[tuple[float, float]] = []
        self.held_s = 0.0
        self._free = 0.0
        self.hz = hz
        self._latency_s, self._gap_s, self._depth, self._load_s = latency_s, gap_s, depth, load_s
        self._queued: deque[float] = deque()

    def read(self) -> float:
        """The host's clock."""
        return self.host

    def launch(self, kernel_s: float, host_s: float = 6e-6) -> None:
        """Launch a kernel after so much of the host's time."""
        self.host += host_s
        self.kernels.append(self._run(kernel_s))

    def now(self) -> Event:
        self.host += 1e-6
        return Event(max(self._free, self.host + self._latency_s))

    def has_passed(self, moment: Event) -> bool:
        return moment.at <= self.host

    def wait_for(self, moment: Event) -> None:
        self.host = max(self.host, moment.at)

    def seconds(self, start: Event, end: Event) -> float:
        if max(start.at, end.at) > self.host:
            raise NotReachedError("device not ready")
        return end.at - start.at

    def hold(self, cycles: int) -> None:
        """Spin; it is no kernel of the model."""
        self.host += 4e-6 + self._load_s
        self._load_s = 0.0
        start, end = self._run(cycles / self.hz)
        self.held_s += end - start

    def synchronize(self) -> None:
        """Have the host wait for all that is queued, as `.item()` does."""
        self.host = max(self.host, self._free)

    def busy_s(self, start: float, end: float, first: int = 0) -> float:
        """How much of a time kernels run.

        Args:
            start: of the time.
            end: of the time.
            first: number of the kernel to begin with, if those before are known to be over.
        """
        return sum(max(0.0, min(end, b) - max(start, a)) for a, b in self.kernels[first:])

    def _run(self, seconds: float) -> tuple[float, float]:
        while self._queued and self._queued[0] <= self.host:
            self._queued.popleft()
        if len(self._queued) >= self._depth:
            self.host = self._queued.popleft()
        # The gap between two that are queued is no wait for the host.
        start = max(self._free, self.host + self._latency_s - self._gap_s)
        self._free = start + self._gap_s + seconds
        self._queued.append(self._free)
        return start, self._free
