"""Reads the Python frames of a thread, and tracks the progress of the main thread."""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from types import FrameType

import lightning
import torch

from azureml_strategy.lightning_internals import entry_of_fit

_MOST_FRAMES = 8
_LIGHTNING = os.path.dirname(lightning.__file__)
_ENTRY = os.path.join(_LIGHTNING, "pytorch", "trainer", "call.py")
_TORCH = os.path.dirname(torch.__file__)
_STANDARD = sysconfig.get_path("stdlib")
# A thread inside one of these files waits for other ranks.
_COMMUNICATION = tuple(
    os.path.join(_TORCH, "distributed", name)
    for name in ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py")
)

Frames = list[tuple[str, int, str]]

# Phases that take long without a batch: models are built, sharded, compiled and loaded; checkpoints are written.
START, CHECKPOINT, STOP_BARRIER, END = "start-up", "writing a checkpoint", "standing still", "end of the run"
TRAINING = "training"
# A pause may last this many times as long as the longest one before.
_GROWTH = 3


def frames_of(thread: int) -> Frames:
    """Return file, line and function of a thread's frames, innermost first, 64 at most; empty if it has ended."""
    frame = sys._current_frames().get(thread)
    summary = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=64, lookup_lines=False) if frame else []
    return [(each.filename, each.lineno or 0, each.name) for each in summary]


def trainer_frame(thread: int) -> FrameType | None:
    """Return the frame of the innermost call of `Trainer.fit` or a similar method that a thread is in, or None."""
    return next((frame for frame in _walk(thread) if _is_entry(frame)), None)


def is_inside(thread: int, frame: FrameType) -> bool:
    """Whether a thread is still inside the call with this frame, directly or in a nested call."""
    # A stack that changes during the walk may seem to end early, but hardly twice in a row.
    return any(each is frame for _ in range(2) for each in _walk(thread))


def communicates(frames: Frames) -> bool:
    """Whether the innermost frame outside of the standard library is in torch's collectives."""
    below = (file for file, _, _ in frames if not _is_standard(file))
    return next(below, "").startswith(_COMMUNICATION)


def own_place(frames: Frames) -> str:
    """Return the innermost frame below Lightning's loops that is neither torch's nor the standard library's; or ""."""
    below = itertools.takewhile(lambda frame: not frame[0].startswith(_LIGHTNING), frames)
    return next((line(*frame) for frame in below if not frame[0].startswith(_TORCH) and not _is_standard(frame[0])), "")


def place(frames: Frames) -> str:
    """Like `own_place`, but return the innermost frame if there is none."""
    return own_place(frames) or (line(*frames[0]) if frames else "?")


def lines(frames: Frames) -> list[str]:
    """Return the innermost frames as text."""
    return [line(*frame) for frame in frames[:_MOST_FRAMES]]


def line(file: str, number: int, function: str) -> str:
    """Return one frame as text."""
    return f"{file}:{number} in {function}"


def _walk(thread: int) -> Iterator[FrameType]:
    return (frame for frame, _ in traceback.walk_stack(sys._current_frames().get(thread)))


def _is_entry(frame: FrameType) -> bool:
    return frame.f_code.co_filename == _ENTRY and frame.f_code.co_name == entry_of_fit.__name__


def _is_standard(file: str) -> bool:
    """Whether a file is in the standard library; site-packages may be below the same folder."""
    return file.startswith((_STANDARD, "<frozen")) and "site-packages" not in file


class Progress:
    """The progress of the main thread, which the watch thread reads.

    A healthy run may go without progress for `stall_after_s`; for `slow_after_s` up to the end of the first batch, and
    later in all phases but training: validations, ends of epochs, checkpoints.
    """

    def __init__(self, stall_after_s: float, slow_after_s: float) -> None:
        self._limits_s = (stall_after_s, slow_after_s)
        self._longest_s = 0.0
        self._noted_at = time.monotonic()
        self._warm = False
        self.phase = START

    def note(self, phase: str) -> None:
        """Note progress of the main thread in a phase that begins or goes on."""
        now = time.monotonic()
        if self.phase not in (START, CHECKPOINT, STOP_BARRIER):
            self._longest_s = max(self._longest_s, now - self._noted_at)
        self._noted_at, self.phase = now, phase

    def batch_done(self, phase: str) -> None:
        """Like `note`, at the end of a batch of the kind that the run is for: it ends the start-up."""
        self.note(phase)
        self._warm = True

    def touch(self) -> None:
        """Note progress that another thread has seen; the phase stays."""
        self._noted_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._noted_at

    @property
    def limit_s(self) -> float:
        """Seconds that the current pause may last; infinite at a stop barrier."""
        if self.phase == STOP_BARRIER:
            return float("inf")
        usual_s, slow_s = self._limits_s
        return max(usual_s if self._warm and self.phase == TRAINING else slow_s, _GROWTH * self._longest_s)
