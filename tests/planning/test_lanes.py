"""Two lanes that work at the same time."""

from __future__ import annotations

import pytest

from azureml_strategy.planning.lanes import Task, Tasks, run_lanes


def test_lanes_work_at_the_same_time() -> None:
    tasks = Tasks()
    first = tasks.add("first", "compute", 2.0)
    tasks.add("second", "compute", 3.0)
    tasks.add("bucket", "network", 1.0, first)
    timeline = run_lanes(tasks.listed)
    assert timeline.total_s == pytest.approx(5.0)
    assert timeline.ends == pytest.approx((2.0, 5.0, 3.0))
    assert timeline.exposed_s == pytest.approx(0.0)


def test_what_is_over_after_the_computation_is_exposed() -> None:
    tasks = Tasks()
    last = tasks.add("backward", "compute", 2.0)
    sent = tasks.add("bucket", "network", 1.5, last)
    tasks.add("optimizer", "compute", 0.25, sent)
    timeline = run_lanes(tasks.listed)
    assert timeline.total_s == pytest.approx(3.75)
    assert timeline.exposed_s == pytest.approx(1.5)
    assert timeline.network_s == pytest.approx(1.5)


def test_computation_is_slower_while_the_network_is_busy() -> None:
    # One second of traffic, in which a quarter of a second of computation is lost.
    timeline = run_lanes([Task("backward", "compute", 4.0), Task("bucket", "network", 1.0)], slowdown=0.25)
    assert timeline.total_s == pytest.approx(4.25)


def test_tasks_that_take_no_time_are_done() -> None:
    timeline = run_lanes([Task("nothing", "compute", 0.0), Task("nothing", "network", 0.0, after=(0,))])
    assert timeline.total_s == 0.0


def test_a_circle_is_refused() -> None:
    with pytest.raises(ValueError, match="in a circle"):
        run_lanes([Task("one", "compute", 1.0, after=(1,)), Task("other", "network", 1.0, after=(0,))])
