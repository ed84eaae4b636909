"""Measures time and bandwidth of one collective at one message size."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from azureml_strategy.bench.collectives import Collective, Place, check

# Messages with which c10d's Backend ("Backend gloo does not support ..."), gloo and NCCL refuse an operation or dtype.
_REFUSAL = re.compile(r"not support|unsupported|invalid scalar type", re.I)


@dataclass(frozen=True)
class Procedure:
    """How to measure.

    Attributes:
        dtype: data type of the elements.
        iterations: number of timed runs.
        warmup: number of runs before the timed ones.
    """

    dtype: torch.dtype
    iterations: int
    warmup: int


@dataclass(frozen=True)
class Measurement:
    """The measurement of one collective at one message size. Bandwidths are for the median time, in GB/s (10^9 bytes).

    Attributes:
        collective: name of the collective.
        size: message size in bytes, as nccl-tests counts it.
        median_s: median over the iterations of the slowest rank's time, in seconds.
        p95_s: 95th percentile of these times.
        min_s: shortest of these times.
        max_s: longest of these times.
        algorithm_bandwidth: size over time.
        bus_bandwidth: algorithm bandwidth times the collective's factor: what a link carries, whatever the number
            of ranks.
        checked: number of result elements compared on each rank.
        wrong: number of wrong elements, on the rank with the most.
    """

    collective: str
    size: int
    median_s: float
    p95_s: float
    min_s: float
    max_s: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    checked: int
    wrong: int


class Unavailable(RuntimeError):  # noqa: N818 - reads as what happened
    """The backend does not have this collective for this data type."""


def measure(collective: Collective, place: Place, size: int, procedure: Procedure) -> Measurement:
    """Check a collective, then time it. Every process of the group must call it.

    Args:
        collective: the collective to measure.
        place: this process in the group.
        size: message size in bytes; rounded down to a whole number of elements for each rank, but at least one.
        procedure: how to measure.

    Raises:
        Unavailable: the backend refuses the collective. All processes raise it.
    """
    dtype = procedure.dtype
    total = max(1, size // dtype.itemsize // place.world_size) * place.world_size
    sent, received = collective.buffers(total, place, dtype)
    try:
        found = check(collective, sent, received, total, place)
    except RuntimeError as error:
        if not _REFUSAL.search(str(error)):
            raise
        raise Unavailable(str(error)) from error
    sent.zero_()  # repeated sums in place would grow to infinity
    seconds = _time(lambda: collective.run(sent, received, place), place, procedure)
    median = statistics.median(seconds)
    bandwidth = total * dtype.itemsize / median / 1e9
    return Measurement(
        collective=collective.name,
        size=total * dtype.itemsize,
        median_s=median,
        p95_s=statistics.quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else median,
        min_s=min(seconds),
        max_s=max(seconds),
        algorithm_bandwidth=bandwidth,
        bus_bandwidth=bandwidth * collective.bus_factor(place.world_size),
        checked=found.checked,
        wrong=found.wrong,
    )


def _time(run: Callable[[], None], place: Place, procedure: Procedure) -> list[float]:
    """Return the slowest rank's time of each iteration: a collective ends when the last rank does."""
    seconds = []
    for _ in range(procedure.warmup + procedure.iterations):
        place.barrier()
        start = time.perf_counter()
        run()
        place.synchronize()
        seconds.append(time.perf_counter() - start)
    return place.highest(seconds[procedure.warmup :])
