"""Keeps the host's memory small while a model is built in parts."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_SMALL = 2**20
# The threshold that glibc reaches by itself when blocks of this size are freed, see "M_MMAP_THRESHOLD" in mallopt(3).
_LARGEST = 32 * 2**20


@contextmanager
def large_blocks_returned() -> Iterator[None]:
    """Let glibc return each freed tensor of 1 MiB and more to the system at once. Other C libraries are left alone.

    When a large block has been freed, glibc takes later ones up to its size from its heap. Whole layers are freed
    between parts of layers that stay, so the heap would get holes as large as the model: a rank that keeps half of the
    model would hold the memory of all of it. After the context large blocks come from the heap again, which is quicker
    in training.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        yield
        return
    set_option(_MMAP_THRESHOLD, _SMALL)
    try:
        yield
    finally:
        set_option(_MMAP_THRESHOLD, _LARGEST)
        set_option(_TRIM_THRESHOLD, 2 * _LARGEST)
