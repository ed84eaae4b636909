"""Measures how long steps take, with events of the GPU stream or the host clock, without a synchronization per step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from azureml_strategy.tracking.step_breakdown import Breakdown
from azureml_strategy.tracking.step_meters import Clock


class HostClock:
    """Moments on the host's monotonic clock, for devices whose work the host itself does, such as a CPU."""

    def __init__(self, read: Callable[[], float]) -> None:
        self.now = read

    def has_passed(self, moment: float) -> bool:
        """Always true: the moment was read from the clock."""
        return True

    def wait_for(self, moment: float) -> None:
        """Do nothing: the moment has passed."""

    def seconds(self, start: float, end: float) -> float:
        """The difference of the two moments."""
        return end - start


class CudaClock:
    """Moments on the GPU's current stream, as CUDA events.

    The host queues work far ahead of the GPU, so its own clock says little about a step. Recording an event takes a few
    microseconds, and nothing waits for it. The event is read once the GPU has passed it.
    """

    def now(self) -> torch.cuda.Event:
        """Record an event after everything queued so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def has_passed(self, moment: torch.cuda.Event) -> bool:
        """Whether the GPU has passed the event; does not wait."""
        return bool(moment.query())  # type: ignore[no-untyped-call]

    def wait_for(self, moment: torch.cuda.Event) -> None:
        """Make the host wait for the event."""
        moment.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Time on the GPU between two events. CUDA measures milliseconds with a resolution of about 0.5 us."""
        return float(start.elapsed_time(end)) / 1e3


class Step(NamedTuple):
    """One optimizer step of this rank.

    Attributes:
        samples: samples of all its batches.
        seconds: from the end of the previous step to its own end.
        waited_s: the part of it that passed before its batches were ready on the device.
        flops: floating-point operations of the model on its batches; 0 if nothing counts them.
        parts: seconds of each `Part`, in its order; empty if they are not measured.
    """

    samples: int
    seconds: float
    waited_s: float
    flops: float = 0.0
    parts: Sequence[float] = ()


# Samples, FLOPs, moments, and what the meter keeps.
_Done = tuple[int, float, list[Any], Any]


class StepRecorder:
    """Turns the moments of a training loop into steps.

    A step has one batch, or several with accumulated gradients. It starts at the end of the previous one, or when
    training resumes after something else. A breakdown measures what each step spends its time on.
    """

    def __init__(self, clock: Clock, breakdown: Breakdown | None = None) -> None:
        self._clock = clock
        self._done: deque[_Done] = deque()
        self._breakdown = breakdown
        self._begin(clock.now())

    def resume(self) -> None:
        """Training resumes after a pause. The time before belongs to no step."""
        interrupted = len(self._moments) > 1
        moment = self._clock.now()
        if self._breakdown is not None:
            self._breakdown.cut_step(moment)
        self._begin(moment)
        self._whole = not interrupted

    def discard_step(self) -> None:
        """Leave out the step in progress, because something other than training happens now, for an unknown time."""
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
        """The last batch was the last one of its step; `keep` is False during the warm-up."""
        parts = self._breakdown.cut_step(self._moments[-1]) if self._breakdown is not None else None
        if keep and self._whole and (parts is not None or self._breakdown is None):
            self._done.append((self._samples, self._flops, self._moments, parts))
        self._begin(self._moments[-1])

    def take(self, wait: bool = False) -> list[Step]:
        """The steps that have ended since the last call, in order.

        With `wait`, the host waits for the steps that the device has yet to finish. Else a later call returns them.
        """
        for done in self._done if wait else ():
            for moment in self._moments_of(done):
                self._clock.wait_for(moment)
        steps = []
        # All of a step's moments: a script may have switched streams within it, so that the last is not reached last.
        while self._done and all(map(self._clock.has_passed, self._moments_of(self._done[0]))):
            samples, flops, moments, parts = self._done.popleft()
            seconds = self._clock.seconds(moments[0], moments[-1])
            waited_s = sum(map(self._clock.seconds, moments[0:-1:2], moments[1::2]))
            known = self._breakdown.meter.seconds(parts) if self._breakdown is not None else ()
            steps.append(Step(samples, seconds, waited_s, flops, known))
        return steps

    def _moments_of(self, done: _Done) -> list[Any]:
        _, _, moments, parts = done
        return [*moments, *(self._breakdown.meter.moments(parts) if self._breakdown is not None else ())]

    def _begin(self, moment: Any) -> None:
        # The start of the step; then for each batch, when it was ready and when it was done.
        self._moments: list[Any] = [moment]
        self._samples, self._flops = 0, 0.0
        self._whole = True
