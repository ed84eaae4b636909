"""Sets of times: unions and differences of intervals, in any unit."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]
"""A start and an end, which is not before the start."""
Intervals = list[Interval]
"""Sorted intervals with a gap between each two; none is empty."""


def union(intervals: Iterable[Interval]) -> Intervals:
    """Return the times in at least one interval. Intervals may be in any order, overlap, touch or be empty."""
    joined: Intervals = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def subtract(whole: Intervals, away: Intervals) -> Intervals:
    """Return the times in the first set that are not in the second one."""
    left: Intervals = []
    index = 0
    for start, end in whole:
        while index < len(away) and away[index][1] <= start:
            index += 1
        place = index
        while place < len(away) and away[place][0] < end:
            if start < away[place][0]:
                left.append((start, away[place][0]))
            start = max(start, away[place][1])
            place += 1
        if start < end:
            left.append((start, end))
    return left


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """Return the times that are in both sets."""
    return subtract(one, subtract(one, other))


def total(intervals: Intervals) -> float:
    """Return the length of all intervals together."""
    return sum(end - start for start, end in intervals)
