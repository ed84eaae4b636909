"""The options of a benchmark: collectives, message sizes, repetitions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from azureml_strategy.bench.collectives import COLLECTIVES

_UNITS: dict[str, int] = {
    **{"": 1, "b": 1},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", re.I)
BACKENDS = ("nccl", "gloo")
DTYPES = ("float32", "bfloat16", "float16")


class BenchError(ValueError):
    """The command line is wrong, or the job cannot be measured as asked."""


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read message sizes and return them in bytes, ascending.

    Args:
        text: sizes and ranges, separated by commas. `1MB-256MB` is every doubling of 1 MB up to 256 MB, and 256 MB.

    Raises:
        BenchError: a part cannot be read as a size, or a range goes from large to small.
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
    """Return a size in bytes as text: in a binary unit if it is a whole number of them, else in a decimal unit."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        whole, rest = divmod(size, _UNITS[unit.lower()])
        if rest == 0 and 1 <= whole < 1024:
            return f"{whole} {unit}"
    unit = next((unit for unit in ("TB", "GB", "MB", "KB") if size >= _UNITS[unit.lower()]), "B")
    return f"{size / _UNITS[unit.lower()]:.4g} {unit}"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure, and where the results go; None leaves the choice to the benchmark.

    Attributes:
        collectives: names of the collectives, in the order of the table; by default all.
        sizes: message sizes in bytes, ascending.
        iterations: number of timed runs of each size.
        warmup: number of runs before the timed ones.
        dtype: data type of the elements.
        backend: `nccl` or `gloo`; by default NCCL if there is a GPU.
        timeout_s: seconds to wait for the job's other processes, and for a collective.
        expect: bus bandwidth that all-reduce should reach, in GB/s; by default that of the VM size.
        pairs: whether to measure every two nodes instead of all nodes together.
        output: path of the JSON file.
        plot: path of the PNG file.
        mlflow: whether to log into the job's MLflow run.

    Raises:
        BenchError: a name is unknown, a number is out of range, or two options exclude each other.
    """

    collectives: Sequence[str] | None = None
    sizes: Sequence[int] | None = None
    iterations: int | None = None
    warmup: int | None = None
    dtype: str = "float32"
    backend: str | None = None
    timeout_s: float = 600.0
    expect: float | None = None
    pairs: bool = False
    output: Path = Path("outputs/bench.json")
    plot: Path = Path("outputs/bench.png")
    mlflow: bool = True

    def __post_init__(self) -> None:
        if self.pairs and self.collectives is not None:
            raise BenchError("--pairs measures all-reduce. Leave --collectives out, or --pairs.")
        for name in self.collectives or ():
            _refuse_unknown("--collectives", name, tuple(COLLECTIVES))
        _refuse_unknown("--dtype", self.dtype, DTYPES)
        if self.backend is not None:
            _refuse_unknown("--backend", self.backend, BACKENDS)
        _refuse_below("--iterations", self.iterations, 1)
        _refuse_below("--warmup", self.warmup, 0)
        for option, value in (("--timeout", self.timeout_s), ("--expect", self.expect)):
            if value is not None and not 0 < value < float("inf"):
                raise BenchError(f"{option} {value:g} cannot be: give a number above 0.")


def _refuse_unknown(option: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise BenchError(f"{option}: there is no {name!r}. Use {', '.join(known)}.")


def _refuse_below(option: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise BenchError(f"{option} {value} is too few: give {least} or more.")
