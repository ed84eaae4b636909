"""The schedule of a pipeline, beside its formula and a search over the orders of its passes."""

from __future__ import annotations

import pytest

from azureml_strategy.planning.pipeline_schedule import schedule_1f1b


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 7, 64])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(stages: int, micro_batches: int) -> None:
    found = schedule_1f1b([1.0] * stages, [2.0] * stages, micro_batches)
    assert found.total_s == pytest.approx(3.0 * (micro_batches + stages - 1))
    assert found.bubble_s / found.total_s == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_one_stage_has_no_bubble() -> None:
    found = schedule_1f1b([1.5], [2.5], 5)
    assert (found.total_s, found.bubble_s) == (20.0, 0.0)


def test_the_slowest_stage_bounds_a_long_pipeline() -> None:
    found = schedule_1f1b([1.0, 3.0, 1.0], [2.0, 5.0, 2.0], 100)
    assert found.busiest_s == 800.0
    # Around the busiest stage: the first forward pass arrives after 1, the last backward pass goes on for 2, and the
    # last stage answers within 3 the one time that the middle one waits for it.
    assert 803.0 <= found.total_s <= 806.0


def test_messages_delay_what_waits_for_them() -> None:
    # Two stages and one micro-batch: forward, message, forward, backward, message, backward.
    found = schedule_1f1b([1.0, 1.0], [2.0, 2.0], 1, [0.5])
    assert found.total_s == pytest.approx(1.0 + 0.5 + 1.0 + 2.0 + 0.5 + 2.0)
