from __future__ import annotations

import pytest
import torch

from azureml_strategy.tracking.timing.steps import CudaClock, HostClock, Step, StepRecorder


def test_host_clock_measures_what_it_reads() -> None:
    readings = iter([1.5, 4.0])
    clock = HostClock(lambda: next(readings))
    start, end = clock.now(), clock.now()
    assert clock.has_passed(end)
    assert clock.seconds(start, end) == 2.5


@pytest.mark.cuda
def test_cuda_clock_measures_the_gpu_and_does_not_wait() -> None:
    clock = CudaClock()
    torch.cuda.synchronize()
    start = clock.now()
    torch.cuda._sleep(500_000_000)  # cycles: a quarter of a second at 2 GHz
    end = clock.now()
    assert not clock.has_passed(end)
    clock.wait_for(end)
    assert clock.has_passed(end)
    assert 0.1 < clock.seconds(start, end) < 2.0


class Loop:
    """A training loop whose clock moves only when told to."""

    def __init__(self) -> None:
        self.time = 0.0
        self.recorder = StepRecorder(HostClock(lambda: self.time))

    def batch(self, wait: float, work: float, samples: int = 4) -> None:
        self.time += wait
        self.recorder.batch_ready()
        self.time += work
        self.recorder.batch_done(samples)

    def step(self, wait: float = 1.0, work: float = 3.0, samples: int = 4, keep: bool = True) -> None:
        self.batch(wait, work, samples)
        self.recorder.step_done(keep)


def test_step_lasts_from_end_to_end() -> None:
    loop = Loop()
    loop.step(wait=1, work=3, samples=4)
    loop.step(wait=2, work=5, samples=7)
    assert loop.recorder.take() == [Step(4, 4.0, 1.0), Step(7, 7.0, 2.0)]
    assert loop.recorder.take() == []


def test_step_of_several_batches_adds_them_up() -> None:
    loop = Loop()
    loop.batch(wait=1, work=2, samples=4)
    loop.step(wait=0.5, work=4, samples=3)
    assert loop.recorder.take() == [Step(7, 7.5, 1.5)]


def test_warm_up_is_not_kept() -> None:
    loop = Loop()
    loop.step(keep=False)
    loop.step(wait=1, work=1)
    assert loop.recorder.take() == [Step(4, 2.0, 1.0)]


def test_a_pause_belongs_to_no_step() -> None:
    loop = Loop()
    loop.step()
    loop.time += 100
    loop.recorder.resume()
    loop.step(wait=1, work=3)
    assert loop.recorder.take() == [Step(4, 4.0, 1.0)] * 2


def test_a_pause_between_the_batches_of_a_step_leaves_the_step_out() -> None:
    loop = Loop()
    loop.batch(1, 1)
    loop.recorder.resume()
    loop.step()
    loop.step(wait=0, work=2)
    assert loop.recorder.take() == [Step(4, 2.0, 0.0)]


def test_a_spoilt_step_is_left_out() -> None:
    loop = Loop()
    loop.recorder.discard_step()
    loop.step(work=50)
    loop.step(wait=0, work=2)
    assert loop.recorder.take() == [Step(4, 2.0, 0.0)]


class LateClock(HostClock):
    """Passes a moment only when the device has come to it."""

    device_time = 0.0

    def has_passed(self, moment: float) -> bool:
        return moment <= self.device_time

    def wait_for(self, moment: float) -> None:
        self.device_time = moment


def test_steps_come_when_the_device_is_done_with_them() -> None:
    loop = Loop()
    clock = LateClock(lambda: loop.time)
    loop.recorder = StepRecorder(clock)
    for _ in range(3):
        loop.step(wait=1, work=3)
    clock.device_time = 9.0
    assert len(loop.recorder.take()) == 2
    assert len(loop.recorder.take()) == 0
    assert loop.recorder.take(wait=True) == [Step(4, pytest.approx(4.0), pytest.approx(1.0))]
