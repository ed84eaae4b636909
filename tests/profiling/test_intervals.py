from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.profiling.trace_summary import Interval, Intervals, intersect, subtract, total, union

# Whole numbers, so that a set of the unit intervals within is an oracle.
SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda each: (each[0], each[0] + each[1])))


def units(intervals: list[Interval]) -> set[int]:
    return {unit for start, end in intervals for unit in range(int(start), int(end))}


def is_canonical(intervals: Intervals) -> bool:
    gaps = all(one[1] < other[0] for one, other in itertools.pairwise(intervals))
    return gaps and all(start < end for start, end in intervals)


@given(SPANS)
def test_a_union_has_what_is_in_any(spans: list[Interval]) -> None:
    joined = union(spans)
    assert units(joined) == units(spans)
    assert is_canonical(joined)
    assert total(joined) == len(units(spans))


@given(SPANS, SPANS)
def test_a_difference_has_what_is_in_the_first_alone(one: list[Interval], other: list[Interval]) -> None:
    left = subtract(union(one), union(other))
    assert units(left) == units(one) - units(other)
    assert is_canonical(left)


@given(SPANS, SPANS)
def test_an_intersection_has_what_is_in_both(one: list[Interval], other: list[Interval]) -> None:
    both = intersect(union(one), union(other))
    assert units(both) == units(one) & units(other)
    assert is_canonical(both)
