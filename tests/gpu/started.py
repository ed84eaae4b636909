"""Processes that a test has started through others: that they are there, and that they are gone."""

from __future__ import annotations

import time
from pathlib import Path

import psutil


def ids_below(folder: Path, count: int) -> list[int]:
    """Wait until so many processes have written their ids."""
    until = time.monotonic() + 60
    while len(found := [int(each.name) for each in folder.iterdir() if each.name.isdigit()]) < count:
        assert time.monotonic() < until, found
        time.sleep(0.02)
    return found


def wait_for_end(ids: list[int]) -> None:
    """Wait until none of these processes is left but for its parent to read its exit code."""
    until = time.monotonic() + 60
    while any(map(_lives, ids)):
        assert time.monotonic() < until, "a process lives on"
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
