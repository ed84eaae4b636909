"""What a strategy needs to write its part of a checkpoint behind the training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

Value = TypeVar("Value")


class Exchange(Protocol):
    """Threads of all ranks that write one checkpoint; each method is called by all of them, in the same order.

    Attributes:
        rank: this process's global rank.
    """

    rank: int

    def together(self, step: Callable[[], Value]) -> list[Value]:
        """What a step returned on each rank, on all of them; raises on all where it failed on one."""
        ...

    def on_rank_zero(self, step: Callable[[], Value]) -> Value:
        """What a step returned on rank 0, on all of them; raises on all where it failed."""
        ...


WriteStaged = Callable[[Any, Path, Exchange], None]
"""Writes what was staged, or a copy of it, below a path: on any thread, in steps that all ranks take together."""
