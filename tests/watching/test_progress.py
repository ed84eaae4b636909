from __future__ import annotations

import pytest
from tests.clock import Clock

from azureml_strategy.watching import progress
from azureml_strategy.watching.progress import CHECKPOINT, STANDSTILL, START, Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_the_start_may_take_longer_until_a_batch_is_done(clock: Clock) -> None:
    notes = Progress(600, 1800)
    assert (notes.phase, notes.limit_s) == (START, 1800)
    notes.note("training")
    clock.now += 700
    assert notes.idle_s == 700
    assert notes.limit_s == 1800
    notes.batch_done("training")
    assert (notes.idle_s, notes.limit_s) == (0, 2100), "the first counts, as any pause"


def test_a_pause_may_take_three_times_as_long_as_the_longest(clock: Clock) -> None:
    notes = Progress(600, 1800)
    notes.batch_done("training")
    for pause_s in (150, 250, 200):
        clock.now += pause_s
        notes.note("training")
    assert notes.limit_s == 750


def test_only_the_training_has_the_shorter_limit(clock: Clock) -> None:
    notes = Progress(600, 1800)
    notes.batch_done("training")
    assert notes.limit_s == 600
    for phase in ("validation", "end of an epoch", "test"):
        notes.batch_done(phase)
        assert notes.limit_s == 1800


def test_what_another_thread_sees_is_progress(clock: Clock) -> None:
    notes = Progress(600, 1800)
    notes.note("training")
    clock.now += 500
    notes.touch()
    assert (notes.idle_s, notes.phase) == (0, "training")


def test_a_checkpoint_may_take_longer_and_does_not_count(clock: Clock) -> None:
    notes = Progress(600, 1800)
    notes.batch_done("training")
    notes.note(CHECKPOINT)
    assert notes.limit_s == 1800
    clock.now += 1000
    notes.note("training")
    assert notes.limit_s == 600


def test_standing_still_on_purpose_has_no_end(clock: Clock) -> None:
    notes = Progress(600, 1800)
    notes.batch_done("training")
    notes.note(STANDSTILL)
    clock.now += 10_000
    assert notes.idle_s < notes.limit_s
    notes.note("training")
    assert notes.limit_s == 600
