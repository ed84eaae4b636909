"""Work and waiting of a stage."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from azureml_strategy.strategies.pipeline import engine, pipeline_bubble
from azureml_strategy.strategies.pipeline.engine import StageClock


class Seconds:
    """The host's clock, which goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    clock = Seconds()
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


@pytest.mark.parametrize(("stages", "micro_batches", "bubble"), [(1, 4, 0.0), (2, 4, 0.2), (4, 12, 0.2), (8, 1, 0.875)])
def test_the_formula(stages: int, micro_batches: int, bubble: float) -> None:
    assert pipeline_bubble(stages, micro_batches) == pytest.approx(bubble)


def test_work_is_the_part_of_a_schedule_spent_in_passes(seconds: Seconds) -> None:
    clock = StageClock(torch.device("cpu"))
    with clock.working():
        pass  # outside a step nothing is taken down
    with clock.step():
        for _ in range(2):
            with clock.working():
                seconds.pass_by(20)
            seconds.pass_by(10)
    assert clock.read() == (40, 50)


def test_what_follows_the_last_pass_is_no_bubble(seconds: Seconds) -> None:
    clock = StageClock(torch.device("cpu"))
    with clock.step():
        with clock.working():
            seconds.pass_by(1)
        seconds.pass_by(100)
    assert clock.read() == (1, 1)


@pytest.mark.cuda
def test_on_a_gpu_the_times_are_the_streams() -> None:
    clock, matrix = StageClock(torch.device("cuda")), torch.zeros(4096, 4096, device="cuda")
    with clock.step():
        with clock.working():
            matrix @ matrix
        torch.cuda._sleep(10_000_000)
    work, whole = clock.read()
    assert 0 < work < whole
