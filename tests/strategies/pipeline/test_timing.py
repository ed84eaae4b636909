"""Work and waiting of a stage."""

from __future__ import annotations

import time

import pytest
import torch

from azureml_strategy.strategies.pipeline import pipeline_bubble
from azureml_strategy.strategies.pipeline.timing import StageClock


@pytest.mark.parametrize(("stages", "micro_batches", "bubble"), [(1, 4, 0.0), (2, 4, 0.2), (4, 12, 0.2), (8, 1, 0.875)])
def test_the_formula(stages: int, micro_batches: int, bubble: float) -> None:
    assert pipeline_bubble(stages, micro_batches) == pytest.approx(bubble)


def test_work_is_the_part_of_a_schedule_spent_in_passes() -> None:
    clock = StageClock(torch.device("cpu"))
    with clock.working():
        pass  # outside a step nothing is taken down
    with clock.step():
        for _ in range(2):
            with clock.working():
                time.sleep(0.02)
            time.sleep(0.01)
    work, whole = clock.read()
    assert 0.04 <= work <= whole - 0.01


def test_what_follows_the_last_pass_is_no_bubble() -> None:
    clock = StageClock(torch.device("cpu"))
    with clock.step():
        with clock.working():
            time.sleep(0.01)
        time.sleep(0.1)
    work, whole = clock.read()
    assert whole - work < 0.1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="events of a stream need a GPU")
def test_on_a_gpu_the_times_are_the_streams() -> None:
    clock, matrix = StageClock(torch.device("cuda")), torch.zeros(4096, 4096, device="cuda")
    with clock.step():
        with clock.working():
            matrix @ matrix
        torch.cuda._sleep(10_000_000)
    work, whole = clock.read()
    assert 0 < work < whole
