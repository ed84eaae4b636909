from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.cluster.job import Price
from azureml_strategy.study import StudyError
from azureml_strategy.study.scaling import Figures, compare


def run(nodes: int, rate: float | None, **fields: object) -> Figures:
    given = {"nodes": nodes, "devices": 8 * nodes, "unit": "images", "samples_per_second": rate, "run_id": f"r{nodes}"}
    return Figures(**(given | fields))  # type: ignore[arg-type]


def test_against_the_smallest() -> None:
    scaling = compare([run(4, 3000.0), run(1, 1000.0), run(2, 1900.0)])
    assert scaling.base == run(1, 1000.0)
    assert [row.figures.nodes for row in scaling.rows] == [1, 2, 4]
    assert [row.speed_up for row in scaling.rows] == pytest.approx([1.0, 1.9, 3.0])
    assert [row.efficiency for row in scaling.rows] == pytest.approx([1.0, 0.95, 0.75])
    assert scaling.complete
    assert scaling.unit == "images"


def test_devices_count_not_nodes() -> None:
    scaling = compare([run(1, 100.0, devices=1), run(1, 380.0, devices=4)])
    assert [row.efficiency for row in scaling.rows] == pytest.approx([1.0, 0.95])


def test_a_run_without_a_rate_takes_its_place_and_compares_with_nothing() -> None:
    failed = run(1, None, devices=None, problem="failed")
    scaling = compare([run(2, 100.0), failed, run(4, 150.0)])
    assert [row.speed_up for row in scaling.rows] == [None, 1.0, 1.5]
    assert not scaling.complete
    nothing = compare([failed])
    assert nothing.base is None
    assert nothing.currency is None


def test_of_several_as_small_the_fastest_is_the_base() -> None:
    assert compare([run(1, 90.0), run(1, 100.0)]).base == run(1, 100.0)


@given(st.sets(st.integers(1, 1000), min_size=1, max_size=5), st.floats(1e-3, 1e9))
def test_perfect_scaling_is_1(sizes: set[int], rate: float) -> None:
    rows = compare([run(nodes, rate * nodes) for nodes in sizes]).rows
    assert [row.efficiency for row in rows] == pytest.approx([1.0] * len(rows))


def test_costs() -> None:
    priced = run(2, 1000.0).priced(Price(90.0, "EUR", "--price-per-hour"))
    assert priced.cost_per_million_samples == pytest.approx(2 * 90 / 3600 * 1000)
    assert compare([priced, run(1, 500.0)]).currency == "EUR"
    assert priced.priced(Price(1.0, "USD", "--price-per-hour")) == priced  # what the run has recorded stays
    assert run(1, None).priced(Price(1.0, "USD", "x")).cost_per_million_samples is None
    assert run(1, 5.0).priced(None).cost_per_million_samples is None


def test_the_error_of_the_planner_is_against_what_was_measured() -> None:
    planned = {"expected_samples_per_second": 1100.0, "expected_low": 900.0, "expected_high": 1300.0}
    assert run(1, 1000.0, **planned).prediction_error == pytest.approx(0.1)
    assert run(1, None, **planned).prediction_error is None
    assert run(1, 1000.0).prediction_error is None


def test_refuses_runs_that_are_not_one_study() -> None:
    with pytest.raises(StudyError, match="The runs count images and tokens"):
        compare([run(1, 1.0), run(2, 1.0, unit="tokens")])
    price = {"cost_per_million_samples": 1.0}
    with pytest.raises(StudyError, match="have costs in EUR and USD"):
        compare([run(1, 1.0, currency="EUR", **price), run(2, 1.0, currency="USD", **price)])


def test_tells_settings_that_differ_but_for_size_and_place() -> None:
    first = {
        "data/batch_size": "32",
        "cluster/num_nodes": "1",
        "trainer/num_nodes": "1",
        "data/root": "/mnt/a",
        "x": "1",
    }
    second = {"data/batch_size": "64", "cluster/num_nodes": "2", "trainer/num_nodes": "2", "data/root": "/mnt/b"}
    differences = compare([run(1, 1.0, params=first), run(2, 1.0, params=second)]).differences
    assert differences == {"data/batch_size": ["32", "64"], "x": ["(not set)", "1"]}
