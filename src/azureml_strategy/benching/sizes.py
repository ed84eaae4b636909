"""Message sizes: read from the command line, and written for a reader."""

from __future__ import annotations

import re

from azureml_strategy.benching.errors import BenchError

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", re.I)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Message sizes in bytes, ascending.

    Args:
        text: sizes and ranges, separated by commas. `1MB-256MB` is every doubling of 1 MB up to 256 MB, and 256 MB.

    Raises:
        BenchError: what cannot be read as a size.
    """
    sizes: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        sizes |= set(_doublings(_parse(first), _parse(last))) if dash else {_parse(first)}
    return tuple(sorted(sizes))


def _parse(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    unit = found[2].lower() if found else ""
    if found is None or unit not in _UNITS:
        raise BenchError(
            f"--sizes: {text.strip()!r} is no message size. Write 64MB (10^6 bytes each) or 64MiB (2^20), a list "
            "1MB,64MB or a range 1MB-256MB."
        )
    size = round(float(found[1]) * _UNITS[unit])
    if size < 1:
        raise BenchError(f"--sizes: {text.strip()!r} is no message: it has no byte. Write 1KB or more.")
    return size


def _doublings(first: int, last: int) -> list[int]:
    if first > last:
        raise BenchError(
            f"--sizes: a range goes from small to large, not from {format_size(first)} to {format_size(last)}. "
            f"Write {format_size(last)}-{format_size(first)}."
        )
    return [*(first << power for power in range((last // first).bit_length()) if first << power <= last), last]


def format_size(size: int) -> str:
    """A size in bytes for a reader: in a binary unit where it is a whole number of them, else in a decimal one."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        whole, rest = divmod(size, _UNITS[unit.lower()])
        if rest == 0 and 1 <= whole < 1024:
            return f"{whole} {unit}"
    unit = next((unit for unit in ("TB", "GB", "MB", "KB") if size >= _UNITS[unit.lower()]), "B")
    return f"{size / _UNITS[unit.lower()]:.4g} {unit}"
