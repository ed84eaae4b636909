"""Which files this process has open."""

from __future__ import annotations

import os
from pathlib import Path


def open_below(folder: Path) -> int:
    """How many descriptors lead to files below the folder; others come and go with threads and other tests' objects."""
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return sum(Path(link).is_relative_to(folder) for link in links)
