from __future__ import annotations

import pytest
from tests.clock import Clock

from azureml_strategy.checkpoint import callback_state
from azureml_strategy.checkpoint.callback_state import SharedTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(callback_state, "time", clock)
    return clock


@pytest.mark.parametrize("batch_s", [0.001, 0.3, 7.0, 1000.0])
def test_due_soon_after_the_interval_with_few_collectives(clock: Clock, batch_s: float) -> None:
    asked: list[tuple[int, bool]] = []

    def broadcast(said: tuple[int, bool]) -> tuple[int, bool]:
        asked.append(said)
        return said

    each = SharedTimer(600.0)
    batches = 0
    while True:
        batches += 1
        clock.now += batch_s
        if each.due(broadcast):
            break
    assert 600 <= batches * batch_s <= 600 + 2 * batch_s
    assert len(asked) <= 25
    assert not any(due for _, due in asked[:-1])
    each.restart()
    clock.now += 1.0
    assert not each.due(broadcast)


def test_other_ranks_follow_rank_0_whatever_their_clocks(clock: Clock) -> None:
    each = SharedTimer(10.0)
    clock.now += 1000.0
    assert not each.due(lambda own: (3, False))
    assert [each.due(lambda own: (1, True)) for _ in range(3)] == [False, False, True]
