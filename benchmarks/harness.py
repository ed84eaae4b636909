"""What every benchmark script shares: interleaved rounds, medians with their spread, and the machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich import box
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
Measured = TypeVar("Measured")
_PACKAGES = ("torch", "lightning", "mlflow", "numpy")


@dataclass(frozen=True)
class Spread:
    """The middle of some measurements and how far they lie apart.

    Attributes:
        median: the middle one.
        low: first quartile.
        high: third quartile.
        count: how many there are.
    """

    median: float
    low: float
    high: float
    count: int

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        """Median and quartiles, multiplied by `scale`."""
        median, low, high = (f"{scale * value:,.{digits}f}" for value in (self.median, self.low, self.high))
        return f"{median} ({low} to {high})"


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles; of a single value, that value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


def interleave(
    cases: Mapping[str, Callable[[], Measured]], rounds: int = 5, warmup: int = 1
) -> dict[str, list[Measured]]:
    """Measure the cases in turns, A B C A B C, so that a drift of the machine meets all of them alike.

    Args:
        cases: each runs once and returns its measurement.
        rounds: measurements of each case that count; the order turns round every other time.
        warmup: rounds before them, whose measurements are thrown away.

    Returns:
        The measurements of each case; equal positions are of the same round.
    """
    measured: dict[str, list[Measured]] = {name: [] for name in cases}
    for turn in range(warmup + rounds):
        names = list(cases) if turn % 2 == 0 else list(reversed(cases))
        values = {name: cases[name]() for name in names}
        if turn >= warmup:
            for name, value in values.items():
                measured[name].append(value)
    return measured


def differences(values: Sequence[float], baseline: Sequence[float]) -> Spread:
    """What a case adds to another, round by round."""
    return spread([value - base for value, base in zip(values, baseline, strict=True)])


def ratios(values: Sequence[float], baseline: Sequence[float]) -> Spread:
    """What a case takes relative to another, round by round."""
    return spread([value / base for value, base in zip(values, baseline, strict=True)])


def machine() -> dict[str, Any]:
    """The machine and the versions that a figure belongs to."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "os": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "torch_threads": torch.get_num_threads(),
        "load_average_1_5_15_min": os.getloadavg(),  # more than the benchmark itself: somebody else was busy
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def save(name: str, settings: Mapping[str, Any], figures: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write `<folder>/<name>.json`: the machine, the settings and the figures, `Spread`s included."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    content = {
        "benchmark": name,
        "measured": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "machine": machine(),
        "settings": settings,
        "figures": figures,
    }
    path.write_text(json.dumps(content, indent=2, default=asdict) + "\n")
    return path


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(title=title, box=box.ASCII, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    Console(width=120, highlight=False).print(table)
