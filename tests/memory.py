"""Measures what code allocates, in numpy, Python, torch and image libraries alike: by the memory of the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_LOOK_SECONDS = 0.002


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


@contextmanager
def peak_of(most: int) -> Iterator[None]:
    """Fail if the process grows by more bytes than `most` meanwhile. What lasts some milliseconds may be missed."""
    before, peak, ended = _resident(), 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not ended.wait(_LOOK_SECONDS):
            peak = max(peak, _resident())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    grown = max(peak, _resident()) - before
    assert grown <= most, f"the process grew by {grown / 2**20:,.0f} MiB, and {most / 2**20:,.0f} are allowed"
