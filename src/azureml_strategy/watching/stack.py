"""Where a thread is, in Python."""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
import traceback

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


def inside_trainer(thread: int) -> bool:
    """Whether a thread is inside `Trainer.fit` or its like, be it to end it.

    Args:
        thread: its `threading.get_ident`.
    """
    walk = traceback.walk_stack(sys._current_frames().get(thread))
    return any(frame.f_code.co_filename == _ENTRY for frame, _ in walk)


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


def _is_standard(file: str) -> bool:
    """Whether it is Python's own; packages may be installed below its folder."""
    return file.startswith((_STANDARD, "<frozen")) and "site-packages" not in file
