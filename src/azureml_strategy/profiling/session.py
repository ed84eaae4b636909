"""One recording by torch.profiler, of which a process can have only one at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PyTorchProfiler

from azureml_strategy.profiling.request import Details
from azureml_strategy.tracking.timing.span_profiler import user_profiler

# torch does not show whose recording is on. It has a flag that it sets to True when a recording begins. Everywhere else
# it reads only whether the flag is true. So as long as the flag is 2, no recording has begun since ours.
_OURS = 2
LOST = "another torch.profiler was started meanwhile, and torch has only one at a time"
# Open spans of recordings that another recording has replaced. torch has freed the memory of such a recording. When one
# of its spans ends or is deleted, torch would still write into that memory. So these spans are kept for ever.
_never_ended: list[object] = []


def why_busy(trainer: Trainer) -> str | None:
    """Say which other profiler records in this process, or will do so. None if there is none.

    torch does not refuse a second one. It ends the first one without a word, and the trace of that one is empty.
    """
    if isinstance(user_profiler(trainer), PyTorchProfiler):
        return "the Trainer has profiler='pytorch', and torch has only one at a time; leave one of them out"
    if torch.autograd.profiler._is_profiler_enabled:
        return "another torch.profiler records already, and torch has only one at a time"
    return None


class Session:
    """A recording of the steps `first` to `last`. Its methods must be called on the thread that trains.

    With `warms_up` it begins one step earlier, and discards that step, in which the profiler itself starts.
    """

    def __init__(self, first: int, last: int, warms_up: bool, details: Details, device: torch.device) -> None:
        from torch.profiler import ProfilerActivity, profile, supported_activities
        from torch.profiler.profiler import ProfilerAction

        begin = first - 1 if warms_up else first

        def action(step: int) -> ProfilerAction:
            step = max(step, begin)  # torch asks for step 0 before `step_num` is set below
            if step > last:
                return ProfilerAction.NONE
            if step < first:
                return ProfilerAction.WARMUP
            return ProfilerAction.RECORD if step < last else ProfilerAction.RECORD_AND_SAVE

        self._first = first
        on_cpu = device.type == "cpu"
        activities = [ProfilerActivity.CPU] if on_cpu else supported_activities()  # type: ignore[no-untyped-call]
        self._profile = profile(
            activities=activities,
            schedule=action,
            record_shapes=details.shapes,
            with_stack=details.stacks,
            profile_memory=details.memory,
        )
        self._profile.step_num = begin
        self._profile.start()
        if not warms_up:
            self._mark()

    @property
    def is_warming_up(self) -> bool:
        """Whether the first step has not begun."""
        return self._profile.step_num < self._first

    def step(self) -> None:
        """The next step begins.

        Raises:
            RuntimeError: another profiler has been started meanwhile.
        """
        begins = self.is_warming_up
        if self._is_lost:
            self.abandon()
            raise RuntimeError(LOST)
        self._profile.step()
        if begins:
            self._mark()

    def stop(self) -> bool:
        """End the recording, and return whether there is something to write.

        If another profiler has been started meanwhile, its recording goes on.
        """
        if self._is_lost:
            self.abandon()
            return False
        self._profile.stop()
        return not self.is_warming_up

    def write(self, path: Path) -> None:
        """Write the trace in Chrome's format; on any thread.

        Raises:
            OSError, RuntimeError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(path))

    def abandon(self) -> None:
        """Leave the recording as it is, before this object is dropped without `stop`."""
        _never_ended.append(self._profile.step_rec_fn)

    @property
    def _is_lost(self) -> bool:
        """Whether another profiler has been started. From then on, no part of this recording may be touched."""
        return torch.autograd.profiler._is_profiler_enabled != (False if self.is_warming_up else _OURS)

    def _mark(self) -> None:
        torch.autograd.profiler._set_is_profiler_enabled(_OURS)  # type: ignore[arg-type]
