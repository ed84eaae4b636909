"""Where a thread of this process is in Python, and how far its main thread has come."""

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

_MOST_FRAMES = 8
_LIGHTNING = os.path.dirname(lightning.__file__)
_ENTRY = os.path.join(_LIGHTNING, "pytorch", "trainer", "call.py")
_TORCH = os.path.dirname(torch.__file__)
_STANDARD = sysconfig.get_path("stdlib")
# A thread that is in one of these waits for other ranks.
_COMMUNICATION = tuple(
    os.path.join(_TORCH, "distributed", name)
    for name in ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py")
)

Frames = list[tuple[str, int, str]]

# What takes long without a batch going by: models are built, sharded, compiled and loaded; checkpoints are written.
START, CHECKPOINT, STANDSTILL, END = "start-up", "writing a checkpoint", "standing still", "end of the run"
TRAINING = "training"
# A pause may be so many times as long as the longest until then.
_GROWTH = 3


def frames_of(thread: int) -> Frames:
    """File, line and function of a thread's innermost frames, innermost first; none when it has ended.

    Args:
        thread: its `threading.get_ident`.
    """
    frame = sys._current_frames().get(thread)
    summary = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=64, lookup_lines=False) if frame else []
    return [(each.filename, each.lineno or 0, each.name) for each in summary]


def trainer_frame(thread: int) -> FrameType | None:
    """The call of `Trainer.fit` or its like that a thread is in, of several the innermost; None outside of them.

    Args:
        thread: its `threading.get_ident`.
    """
    return next((frame for frame in _walk(thread) if _is_entry(frame)), None)


def is_inside(thread: int, frame: FrameType) -> bool:
    """Whether a thread has not left a call, be it that it has called more since.

    Args:
        thread: its `threading.get_ident`.
        frame: the call's.
    """
    # A stack that changes while one walks along it may seem to end early; hardly twice.
    return any(each is frame for _ in range(2) for each in _walk(thread))


def communicates(frames: Frames) -> bool:
    """Whether the innermost frame, but for Python's own, is one of torch's collectives.

    Args:
        frames: from `frames_of`.
    """
    below = (file for file, _, _ in frames if not _is_standard(file))
    return next(below, "").startswith(_COMMUNICATION)


def own_place(frames: Frames) -> str:
    """The innermost frame of somebody's own code below Lightning's loops; empty if there is none.

    Args:
        frames: from `frames_of`, or a trace's.
    """
    below = itertools.takewhile(lambda frame: not frame[0].startswith(_LIGHTNING), frames)
    return next((line(*frame) for frame in below if not frame[0].startswith(_TORCH) and not _is_standard(frame[0])), "")


def place(frames: Frames) -> str:
    """As `own_place`, or else the innermost frame.

    Args:
        frames: from `frames_of`.
    """
    return own_place(frames) or (line(*frames[0]) if frames else "?")


def lines(frames: Frames) -> list[str]:
    """The innermost frames as text."""
    return [line(*frame) for frame in frames[:_MOST_FRAMES]]


def line(file: str, number: int, function: str) -> str:
    """One frame as text."""
    return f"{file}:{number} in {function}"


def _walk(thread: int) -> Iterator[FrameType]:
    return (frame for frame, _ in traceback.walk_stack(sys._current_frames().get(thread)))


def _is_entry(frame: FrameType) -> bool:
    return frame.f_code.co_filename == _ENTRY and frame.f_code.co_name == "_call_and_handle_interrupt"


def _is_standard(file: str) -> bool:
    """Whether it is Python's own; packages may be installed below its folder."""
    return file.startswith((_STANDARD, "<frozen")) and "site-packages" not in file


class Progress:
    """Notes of the main thread, read by the watch's.

    Args:
        stall_after_s: how long a healthy run may go without a note, in seconds.
        slow_after_s: the same up to the end of the first batch, and then in all but the training itself: validations,
            ends of epochs, checkpoints.
    """

    def __init__(self, stall_after_s: float, slow_after_s: float) -> None:
        self._limits_s = (stall_after_s, slow_after_s)
        self._longest_s = 0.0
        self._noted_at = time.monotonic()
        self._warm = False
        self.phase = START

    def note(self, phase: str) -> None:
        """Something was done.

        Args:
            phase: what comes now.
        """
        now = time.monotonic()
        if self.phase not in (START, CHECKPOINT, STANDSTILL):
            self._longest_s = max(self._longest_s, now - self._noted_at)
        self._noted_at, self.phase = now, phase

    def batch_done(self, phase: str) -> None:
        """As `note`, at the end of a batch of the kind that the run is for: from now on nothing is new."""
        self.note(phase)
        self._warm = True

    def touch(self) -> None:
        """Something was done, as another thread sees it; the phase stays."""
        self._noted_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last note."""
        return time.monotonic() - self._noted_at

    @property
    def limit_s(self) -> float:
        """How long the present pause may last, in seconds; without end while the ranks stand still on purpose."""
        if self.phase == STANDSTILL:
            return float("inf")
        usual_s, slow_s = self._limits_s
        return max(usual_s if self._warm and self.phase == TRAINING else slow_s, _GROWTH * self._longest_s)
