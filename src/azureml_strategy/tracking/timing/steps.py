"""Measures how long steps take, by events of the GPU stream or the host's clock and without a synchronization per
step, and tells where the time of a run goes: each moment belongs to one part, of a step or of the run.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from operator import sub
from threading import get_ident
from typing import Any, NamedTuple

import torch

from azureml_strategy.tracking.timing.meters import Clock, Meter, Part

# The names of the main spans of Lightning and of our pipeline, by part. At their ends a `Meter` reads more than the
# host's clock. `manual_backward` and `optimizer_step` without a class are those of manual optimization.
_MAIN_SPANS = {
    Part.DATA_WAIT: re.compile(r"\[_TrainingEpochLoop\]\.\w+_next"),
    Part.COPY: re.compile(r"\[Strategy\]\w+\.batch_to_device"),
    Part.FORWARD: re.compile(r"\[Strategy\]\w+\.training_step|pipeline_forward"),
    Part.BACKWARD: re.compile(r"\[Strategy\]\w+\.backward|manual_backward|pipeline_backward"),
    Part.OPTIMIZER: re.compile(r"(\[LightningModule\]\w+\.)?optimizer_step"),
    Part.BUBBLE: re.compile(r"pipeline_schedule"),
    Part.COMMUNICATION: re.compile(r"pipeline_reduce"),
}
# The names of other spans, by part. A span that is in neither table belongs to the part that it is called in.
_OTHER_SPANS = {
    Part.VALIDATION: re.compile(r"\[_EvaluationLoop\]\.\w+_next"),
    Part.OPTIMIZER: re.compile(r"\[LightningModule\]\w+\.(optimizer_zero_grad|configure_gradient_clipping)"),
    Part.CHECKPOINT: re.compile(r"save_checkpoint|\[\w+\].*\.on_(save|load)_checkpoint"),
    Part.OTHER: re.compile(
        r"\[(Callback|LightningModule|LightningDataModule)\].*\.(on_|lr_scheduler_step)\w*|run_training_(epoch|batch)"
    ),
}
# The hooks of callbacks and modules in a step: the class, without arguments in a callback's state key, and the hook.
_HOOK = re.compile(
    r"\[(?:Callback|LightningModule)\]([^{]*)(?:\{.*\})?\.(on_train_batch_(?:start|end)|on_(?:before|after)_\w+)"
)
# A script may name a new span in each step. After so many names, all further ones share a line.
_MOST_LINES = 1000


class Phase(IntEnum):
    """What a run does. The phase can change a part: in validation, the copy of a batch counts as validation."""

    STARTUP = 0
    TRAINING = 1
    VALIDATION = 2
    ENDING = 3


# For each phase: what the time of each part counts as.
_ROUTES = {
    Phase.STARTUP: [Part.STARTUP] * len(Part),
    Phase.TRAINING: list(Part),
    Phase.VALIDATION: [Part.CHECKPOINT if each is Part.CHECKPOINT else Part.VALIDATION for each in Part],
    Phase.ENDING: [Part.CHECKPOINT if each is Part.CHECKPOINT else Part.ENDING for each in Part],
}


class Line:
    """The time of one named action so far, without the actions inside of it. It is a context manager."""

    __slots__ = ("_breakdown", "_metered", "calls", "name", "part", "seconds")

    def __init__(self, breakdown: Breakdown, name: str, part: Part | None, metered: bool) -> None:
        self._breakdown = breakdown
        self._metered = metered
        self.name, self.part = name, part
        self.seconds, self.calls = 0.0, 0

    # These two run a hundred times a step, so they call nothing that they can do themselves. Most actions belong to the
    # part that they are called in, so the time of a part is added up only where another part begins.
    def __enter__(self) -> str:
        run = self._breakdown
        now = run.clock()
        run.top.seconds += now - run.last
        run.last = now
        run.stack.append((run.top, run.part))
        run.top = self
        self.calls += 1
        if self.part is not None and self.part is not run.part:
            run.totals[run.route[run.part]] += now - run.since
            run.since = now
            run.part = self.part
        if self._metered:
            run.meter.enter(run.part)
        return self.name

    def __exit__(self, *exception: object) -> None:
        run = self._breakdown
        if run.top is not self:
            run.unwind(self)
            if run.top is not self:
                return
        if self._metered:
            run.meter.leave()
        now = run.clock()
        self.seconds += now - run.last
        run.last = now
        run.top, part = run.stack.pop()
        if part is not run.part:
            run.totals[run.route[run.part]] += now - run.since
            run.since = now
            run.part = part


class Breakdown:
    """The time of a run by parts and by names of actions, on the thread that made this object, since `begun`.

    Attributes:
        totals: seconds of each part so far, by the host's clock.
    """

    def __init__(
        self, meter: Meter | None = None, begun: float | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.clock = clock
        self.meter = meter or Meter()
        self.lines: dict[str, Line] = {}
        self.totals = [0.0] * len(Part)
        self.route = _ROUTES[Phase.STARTUP]
        self.top = self._base = Line(self, "rest of the loop", Part.OTHER, metered=False)
        self.part = Part.OTHER
        self.stack: list[tuple[Line, Part]] = []
        self.last = self.since = clock() if begun is None else begun
        self._thread = get_ident()
        self._checkpoints: tuple[str, ...] = ()
        self._cut_at = list(self.totals)

    def span(self, name: str) -> AbstractContextManager[str]:
        """A context for an action: its line, or on another thread one that does nothing."""
        if get_ident() != self._thread:
            return nullcontext(name)
        return self.lines.get(name) or self._add(name)

    def line(self, name: str) -> Line:
        """The line of an action."""
        return self.lines.get(name) or self._add(name)

    @property
    def is_here(self) -> bool:
        """Whether the caller is on the thread that is measured."""
        return get_ident() == self._thread

    def measure_by(self, meter: Meter) -> None:
        """Use another meter from now on. Call it before training starts."""
        self.meter = meter
        for each in self.lines.values():
            each._metered = self._is_metered(each.name, each.part)

    def checkpoints_by(self, *callbacks: str) -> None:
        """Count hooks as checkpoints whose spans begin with these texts, such as `[Callback]ModelCheckpoint`."""
        self._checkpoints = callbacks

    def begin(self, phase: Phase) -> None:
        """The run does something else from now on."""
        self.flush()
        self.route = _ROUTES[phase]

    def flush(self) -> None:
        """Count the time until now."""
        now = self.clock()
        self.top.seconds += now - self.last
        self.totals[self.route[self.part]] += now - self.since
        self.last = self.since = now

    def cut_step(self, end: Any = None) -> Any:
        """A step ends now, and the next one begins; see `Meter.cut`."""
        self.flush()
        parts = list(map(sub, self.totals, self._cut_at))
        self._cut_at = self.totals.copy()
        return self.meter.cut(parts, end)

    def longest_hook(self) -> tuple[str, Line] | None:
        """The hook in steps that took longest by the host's clock: its name, such as `Ema.on_train_batch_end`."""
        found = ((_HOOK.fullmatch(line.name), line) for line in self.lines.values() if line.part is Part.OTHER)
        hooks = [(f"{match[1].rpartition('.')[2]}.{match[2]}", line) for match, line in found if match]
        return max(hooks, key=lambda hook: hook[1].seconds, default=None)

    def unwind(self, line: Line) -> None:
        """End the lines that were entered after this one and not left, as after `start` without `stop`."""
        if not any(each is line for each, _ in self.stack):
            return  # it has ended already
        while self.top is not line:
            self.top.__exit__()

    def enter_after_hook(self, name: str) -> None:
        """Enter a line from inside a hook that has a line itself. The new line begins when the hook ends."""
        line = self.line(name)
        line.calls += 1
        self.stack.append((line, self.part if line.part is None else line.part))
        if line._metered:
            self.meter.enter(self.stack[-1][1])

    def leave_before_hook(self, name: str) -> None:
        """Leave that line from inside a later hook. The line has ended when that hook began."""
        line = self.line(name)
        if self.stack and self.stack[-1][0] is line:
            self.stack.pop()
            if line._metered:
                self.meter.leave()

    def _add(self, name: str) -> Line:
        if len(self.lines) >= _MOST_LINES:
            name = "further names"
            if name in self.lines:
                return self.lines[name]
        spans = (*_MAIN_SPANS.items(), *_OTHER_SPANS.items())
        part = next((part for part, pattern in spans if pattern.fullmatch(name)), None)
        if name.startswith(self._checkpoints):  # an empty tuple matches no name
            part = Part.CHECKPOINT
        self.lines[name] = Line(self, name, part, self._is_metered(name, part))
        return self.lines[name]

    def _is_metered(self, name: str, part: Part | None) -> bool:
        return part in self.meter.parts and _MAIN_SPANS[part].fullmatch(name) is not None


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
    training resumes after something else. With a breakdown it also measures the parts of each step.
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
        # All moments of a step: if a script switches streams within it, the last moment may not be reached last.
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
