from __future__ import annotations

import pytest

from azureml_strategy.tracking.summary import Totals, summarize


def test_figures_of_one_rank() -> None:
    totals = Totals(steps=20, samples=80, seconds=2.0, waited_s=0.5)
    summary = summarize(totals, [0.01 * n for n in range(1, 21)], ranks=1, replicas=1)
    assert (summary.steps, summary.samples, summary.seconds) == (20, 80, 2.0)
    assert summary.samples_per_second == summary.samples_per_second_per_device == 40.0
    assert summary.step_time_median_s == pytest.approx(0.105)
    assert summary.step_time_p95_s == pytest.approx(0.19)  # 19 of 20 steps took no longer
    assert summary.data_wait_share == 0.25


def test_ranks_add_samples_but_not_time() -> None:
    one = Totals(10, 40, 1.0, 0.1)
    other = Totals(10, 80, 1.0, 0.3)
    summary = summarize(one.plus(other), [0.1], ranks=2, replicas=2)
    assert summary.samples_per_second == 120
    assert summary.samples_per_second_per_device == 60
    assert summary.data_wait_share == pytest.approx(0.2)
    assert summary.steps == 10


def test_ranks_of_one_replica_count_their_samples_once() -> None:
    totals = Totals(40, 160, 4.0, 0.0)  # 4 ranks, each 40 samples in a second
    summary = summarize(totals, [0.1], ranks=4, replicas=2)
    assert summary.samples_per_second == 80
    assert summary.samples_per_second_per_device == 20


def test_metrics_are_the_rates_and_times() -> None:
    metrics = summarize(Totals(1, 4, 2.0, 1.0), [2.0], ranks=1, replicas=1).as_metrics("throughput")
    assert metrics == {
        "throughput/samples_per_second": 2.0,
        "throughput/samples_per_second_per_device": 2.0,
        "throughput/step_time_median_s": 2.0,
        "throughput/step_time_p95_s": 2.0,
        "throughput/data_wait_share": 0.5,
    }
