"""Checks and completes the arguments of data modules."""

from __future__ import annotations

import os

# More decoding processes than this only wait for one another. On a 96-core Azure VM each GPU gets 12.
_MOST_WORKERS = 16


def require(name: str, value: float, valid: bool, rule: str) -> None:
    """Refuse an argument that is out of range.

    Raises:
        ValueError: names the argument, the given value and the rule.
    """
    if not valid:
        raise ValueError(f"{name}={value!r}, but it must be {rule}.")


def default_num_workers(local_processes: int) -> int:
    """This process's share of the cores it may use, from 1 to 16.

    Args:
        local_processes: training processes on this machine.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    return min(max(cores // local_processes, 1), _MOST_WORKERS)
