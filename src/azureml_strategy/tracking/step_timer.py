"""How long steps take: by events of the GPU stream or by the clock, without synchronizing each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

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


class Step(NamedTuple):
    """One optimizer step of this rank.

    Attributes:
        samples: samples of all its batches.
        seconds: from the end of the previous step to its own end.
        waited_s: the part of it before each batch was ready on the device.
        flops: floating-point operations of the model on its batches; 0 where nobody counts them.
    """

    samples: int
    seconds: float
    waited_s: float
    flops: float = 0.0


class StepRecorder:
    """Turns the moments of a training loop into steps.

    A step has one batch, or several where gradients are accumulated. It starts where the previous one ended, or
    where training resumed after something that is not training.

    Args:
        clock: takes the moments.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._done: deque[tuple[int, float, list[Any]]] = deque()
        self._begin(clock.now())

    def resume(self) -> None:
        """Training goes on after a pause: what lies before is no part of a step."""
        interrupted = len(self._moments) > 1
        self._begin(self._clock.now())
        self._whole = not interrupted

    def spoil(self) -> None:
        """Something other than training happens now, of unknown length: leave the step in progress out."""
        self._whole = False

    def batch_ready(self) -> None:
        """The next batch is on the device."""
        self._moments.append(self._clock.now())

    def batch_done(self, samples: int, flops: float = 0.0) -> None:
        """The work on the batch is queued or done."""
        self._moments.append(self._clock.now())
        self._samples += samples
        self._flops += flops

    def step_done(self, keep: bool) -> None:
        """The batch just done was the step's last one; `keep` is False while warming up."""
        if keep and self._whole:
            self._done.append((self._samples, self._flops, self._moments))
        self._begin(self._moments[-1])

    def take(self, wait: bool = False) -> list[Step]:
        """The steps that are over since the last call, in order.

        Args:
            wait: make the host wait for those that the device has yet to finish; else they come with a later call.
        """
        if wait and self._done:
            self._clock.wait_for(self._done[-1][-1][-1])
        steps = []
        while self._done and self._clock.has_passed(self._done[0][-1][-1]):
            steps.append(self._measure(*self._done.popleft()))
        return steps

    def _begin(self, moment: Any) -> None:
        # Start of the step, then for each batch the moment it was ready and the moment it was done.
        self._moments: list[Any] = [moment]
        self._samples, self._flops = 0, 0.0
        self._whole = True

    def _measure(self, samples: int, flops: float, moments: list[Any]) -> Step:
        between = self._clock.seconds
        waited = sum(between(end, ready) for end, ready in zip(moments[0:-1:2], moments[1::2], strict=True))
        return Step(samples, between(moments[0], moments[-1]), waited, flops)
