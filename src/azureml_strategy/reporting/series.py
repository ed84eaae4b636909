"""Holds a metric's history in few buckets that keep every extreme, however many points the run has logged."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

BUCKETS = 400
"""Most buckets of a series. A chart is about as many pixels wide, so more would not be seen."""
# A SQL store has the largest float in place of infinity: mlflow.store.tracking.sqlalchemy_store, sanitize_metric_value.
_INFINITE = sys.float_info.max


@dataclass(frozen=True)
class Series:
    """The history of a metric. Each element is a bucket of neighbouring points; one of a single point is exact.

    Attributes:
        steps: middle of each bucket's steps, in order.
        times_ms: middle of each bucket's times, in ms since 1970.
        means: mean of each bucket's finite values, each of which counts the same.
        lows: smallest finite value of each bucket.
        highs: largest finite value of each bucket.
        counts: number of finite values in each bucket.
        missing: number of values that are NaN or infinite; they are in no bucket.
        first_missing: step of the first of them; None if there is none.
        last_step: largest step of all points, NaN included; None if there are none.
        last_ms: latest time of them, in ms since 1970.
        left_out: number of points that the store has and that were not read; None if there are some, it is unknown how
            many.
    """

    steps: Floats
    times_ms: Floats
    means: Floats
    lows: Floats
    highs: Floats
    counts: Integers
    missing: int = 0
    first_missing: int | None = None
    last_step: int | None = None
    last_ms: int | None = None
    left_out: int | None = 0

    @property
    def points(self) -> int:
        """Number of finite values that were read."""
        return int(self.counts.sum())

    @property
    def exact(self) -> bool:
        """Whether each bucket is one point."""
        return bool(np.all(self.counts == 1))


def reduce_points(
    steps: Integers, times_ms: Integers, values: Floats, buckets: int = BUCKETS, left_out: int | None = 0
) -> Series:
    """Sort points by step and time, and put them into at most `buckets` buckets of nearly equal numbers of points.

    Values may be NaN or infinite. For `left_out` see `Series`.
    """
    ends = (int(steps.max()), int(times_ms.max())) if len(steps) else (None, None)
    order = np.lexsort((times_ms, steps))
    steps, times_ms, values = steps[order], times_ms[order], values[order]
    finite = np.abs(values) < _INFINITE  # False for NaN
    lost = steps[~finite]
    steps, times_ms, values = steps[finite], times_ms[finite], values[finite]
    starts = _starts(len(values), buckets)
    counts = np.diff([*starts, len(values)]).astype(np.int64)
    return Series(
        steps=_means(steps, starts, counts),
        times_ms=_means(times_ms, starts, counts),
        means=_means(values, starts, counts),
        lows=_reduce(np.minimum, values, starts),
        highs=_reduce(np.maximum, values, starts),
        counts=counts,
        missing=len(lost),
        first_missing=int(lost[0]) if len(lost) else None,
        last_step=ends[0],
        last_ms=ends[1],
        left_out=left_out,
    )


def _starts(points: int, buckets: int) -> Integers:
    """Index of each bucket's first point."""
    number = min(points, buckets)
    return (np.arange(number) * points // max(number, 1)).astype(np.int64)


def _reduce(function: np.ufunc, values: Floats, starts: Integers) -> Floats:
    """Reduce the values of each bucket to one by a function of two numbers."""
    return np.asarray(function.reduceat(values, starts)) if len(starts) else np.empty(0)


def _means(values: NDArray[np.generic], starts: Integers, counts: Integers) -> Floats:
    # Divided before they are added, so that the sum of values near the largest float stays finite.
    return _reduce(np.add, values.astype(np.float64) / np.repeat(counts, counts), starts)


def join(several: Sequence[Series], buckets: int = BUCKETS) -> Series:
    """Put the same metric of several nodes or devices into one series, whose bands reach over all of them."""
    order = np.argsort(np.concatenate([each.times_ms for each in several]), kind="stable")

    def joined(name: str) -> Floats:
        return np.asarray(np.concatenate([getattr(each, name) for each in several])[order], np.float64)

    starts = _starts(len(order), min(buckets, max(len(each.steps) for each in several)))
    sizes = np.diff([*starts, len(order)]).astype(np.int64)
    # Buckets of several series hold unequal numbers of points, each of which counts the same.
    points = np.maximum(joined("counts"), 1)
    shares = points / np.repeat(_reduce(np.add, points, starts), sizes)
    return Series(
        steps=_means(joined("steps"), starts, sizes),
        times_ms=_means(joined("times_ms"), starts, sizes),
        means=_reduce(np.add, joined("means") * shares, starts),
        lows=_reduce(np.minimum, joined("lows"), starts),
        highs=_reduce(np.maximum, joined("highs"), starts),
        counts=_reduce(np.add, joined("counts"), starts).astype(np.int64),
        missing=sum(each.missing for each in several),
    )
