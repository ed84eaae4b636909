import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.reporting.series import join, reduce_points

POINTS = st.lists(
    st.tuples(
        st.integers(0, 1000),
        st.integers(0, 2**41),
        st.floats(width=64) | st.sampled_from([sys.float_info.max, math.nan]),
    ),
    max_size=300,
)


def reduced(points, buckets):
    steps, times, values = (np.array(column) for column in zip(*points, strict=True)) if points else ([], [], [])
    return reduce_points(
        np.asarray(steps, np.int64), np.asarray(times, np.int64), np.asarray(values, np.float64), buckets
    )


@given(POINTS, st.integers(1, 50))
def test_extremes_stay_and_every_point_counts_once(points, buckets):
    series = reduced(points, buckets)
    finite = [value for _, _, value in points if abs(value) < sys.float_info.max]
    assert len(series.means) == min(buckets, len(finite))
    assert series.points == len(finite)
    assert series.missing == len(points) - len(finite)
    if finite:
        assert series.lows.min() == min(finite)
        assert series.highs.max() == max(finite)
    assert list(series.steps) == sorted(series.steps)
    slack = 1e-9 * np.maximum(np.abs(series.lows), np.abs(series.highs))
    assert (series.lows <= series.means + slack).all()
    assert (series.means <= series.highs + slack).all()


def test_few_points_stay_as_they_are():
    series = reduced([(2, 20, 0.5), (1, 10, 4.0), (3, 30, -1.0)], 10)
    assert series.exact
    assert series.steps.tolist() == [1, 2, 3]
    assert series.times_ms.tolist() == [10, 20, 30]
    assert series.means.tolist() == [4.0, 0.5, -1.0]


def test_one_spike_in_a_million_points_is_kept():
    steps = np.arange(1_000_000)
    values = np.sin(steps / 1e5)
    values[654_321] = 99.0
    series = reduce_points(steps, steps, values, 400)
    assert series.highs.max() == 99.0
    assert series.means.max() < 2
    assert not series.exact


def test_values_that_are_no_numbers_are_counted_with_the_first_step():
    series = reduced([(1, 1, 1.0), (5, 5, math.nan), (4, 4, math.inf), (6, 6, 2.0)], 10)
    assert series.missing == 2
    assert series.first_missing == 4
    assert series.means.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_history_without_numbers_is_empty(value):
    series = reduced([(0, 0, value)], 10)
    assert not len(series.means)
    assert series.points == 0


def test_joined_series_count_every_point_once():
    """One node logged 3 points a bucket, another one: the mean of both means would be 5."""
    many = reduce_points(np.arange(9), np.arange(9) * 10, np.full(9, 8.0), buckets=3)
    few = reduce_points(np.arange(3), np.arange(3) * 30 + 1, np.full(3, 2.0), buckets=3)
    joined = join([many, few], buckets=1)
    assert joined.means.tolist() == pytest.approx([6.5])
    assert joined.counts.tolist() == [12]
