"""Where a thread is, in Python."""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
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
