"""Collections that a log of any length cannot fill."""

from __future__ import annotations

from typing import TypeVar

LIMIT = 1 << 13

Key = TypeVar("Key")
Value = TypeVar("Value")


def remember(kept: dict[Key, Value], key: Key, value: Value) -> None:
    """Keep the value unless the key has one already or `LIMIT` keys are kept."""
    if len(kept) < LIMIT:
        kept.setdefault(key, value)


def count(counts: dict[Key, int], key: Key, more: int) -> None:
    """Add to the key's count; a new key is left out once `LIMIT` keys are counted."""
    if key in counts or len(counts) < LIMIT:
        counts[key] = counts.get(key, 0) + more
