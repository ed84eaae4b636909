from __future__ import annotations

from pathlib import Path

import pytest

from azureml_strategy.tracking.timing.goodput import GoodputMeter, describe, process_age_s
from azureml_strategy.tracking.timing.steps import Breakdown, Phase


class Clock:
    time = 0.0

    def __call__(self) -> float:
        return self.time


def test_steps_of_a_previous_attempt_are_done_again() -> None:
    """The job had done five steps when it was stopped; this attempt goes on behind the third."""
    clock = Clock()
    breakdown = Breakdown(clock=clock)
    budget = GoodputMeter(breakdown, steps_before=5)
    clock.time += 10
    breakdown.begin(Phase.TRAINING)
    for step in (4, 5, 6, 7):
        clock.time += 1
        breakdown.flush()
        budget.step_done(step)
    breakdown.begin(Phase.VALIDATION)
    clock.time += 4
    found = budget.read()
    assert (found.startup_s, found.redone_s, found.training_s, found.validation_s) == (10, 2, 2, 4)
    assert found.wall_s == clock.time == 18
    assert found.goodput == 2 / 18
    assert found.as_metrics()["time/goodput"] == 2 / 18
    assert sum(value for name, value in found.as_metrics().items() if name.endswith("_s")) == 2 * 18  # with the wall
    assert describe(found) == "11.1% of 18 s (start-up 55.6%, validation 22.2%, work done again 11.1%)"


def test_without_a_previous_attempt_nothing_is_done_again() -> None:
    breakdown = Breakdown(clock=Clock())
    budget = GoodputMeter(breakdown)
    budget.step_done(1)
    assert budget.read().redone_s == 0
    assert budget.read().goodput == pytest.approx(0)


@pytest.mark.parametrize("stat", [None, "", "1 (a) b) S 1", "not ) what proc says"])
def test_a_process_whose_start_is_hidden(tmp_path: Path, stat: str | None) -> None:
    (tmp_path / "self").mkdir()
    if stat is not None:
        (tmp_path / "self/stat").write_text(stat)
    assert process_age_s(tmp_path) == 0.0
