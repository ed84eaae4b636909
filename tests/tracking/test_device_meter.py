"""How much of forward and backward a GPU waits for its host, beside a GPU whose timeline is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tracking.gpu_queue import Event, GpuQueue

from azureml_strategy.tracking.timing.device_meter import DeviceMeter
from azureml_strategy.tracking.timing.meters import Part
from azureml_strategy.tracking.timing.steps import Breakdown, Phase, Step, StepRecorder

# Per kernel: microseconds of the host until it is launched, and of the GPU.
Launches = Sequence[tuple[float, float]]
WARM_UP = 3
RUNS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "launches.json").read_text())


class Found(NamedTuple):
    """What a run showed, as parts of its steps, 0 to 1."""

    steps: list[Step]
    host: float
    truth: float
    held: float


class Loop:
    """A training loop of launches on a GPU that records what the GPU really did in each span."""

    def __init__(self, gpu: GpuQueue, hold: bool = True) -> None:
        self.gpu = gpu
        self.meter = DeviceMeter(gpu, gpu.hold if hold else None, gpu.read)
        self.breakdown = Breakdown(self.meter, clock=gpu.read)
        self.breakdown.begin(Phase.TRAINING)
        self.recorder = StepRecorder(gpu, self.breakdown)
        self.idle: list[float] = []
        self.kept: list[Step] = []
        self._spans: list[tuple[Event, Event, int]] = []
        self._steps = 0

    def span(self, name: str, launches: Launches, sync_after: int | None = None) -> None:
        gpu = self.gpu
        with self.breakdown.line(name):
            start, first = gpu.now(), len(gpu.kernels)
            for number, (host_us, kernel_us) in enumerate(launches):
                gpu.launch(kernel_us * 1e-6, host_us * 1e-6)
                if number == sync_after:
                    gpu.synchronize()
            self._spans.append((start, gpu.now(), first))

    def step(self, forward: Launches, backward: Launches, *, batches: int = 1, sync_after: int | None = None) -> None:
        held = self.gpu.held_s
        for batch in range(batches):
            with self.breakdown.line("[_TrainingEpochLoop].train_dataloader_next"):
                self.gpu.host += 20e-6
            self.recorder.batch_ready()
            self.span("[Strategy]DDPStrategy.training_step", forward, sync_after)
            self.span("[Strategy]DDPStrategy.backward", backward)
            if batch == batches - 1:
                with self.breakdown.line("[LightningModule]Mine.optimizer_step"):
                    self.gpu.launch(20e-6)
            self.recorder.batch_done(samples=1)
        self._steps += 1
        self.recorder.step_done(keep=self._steps > WARM_UP)
        if self._steps > WARM_UP and self.gpu.held_s == held:  # the others are no steps like those of the run
            waits = (end.at - start.at - self.gpu.busy_s(start.at, end.at, first) for start, end, first in self._spans)
            self.idle.append(sum(waits))
        self._spans = []

    def end(self) -> Found:
        self.kept += self.recorder.take(wait=True)
        whole = sum(step.seconds for step in self.kept)
        host = sum(step.parts[Part.HOST] for step in self.kept)
        truth = sum(self.idle) / len(self.idle) * len(self.kept)
        return Found(self.kept, host / whole, truth / whole, self.gpu.held_s)


def run(
    forward: Launches,
    backward: Launches,
    steps: int = 40,
    gpu: GpuQueue | None = None,
    hold: bool = True,
    **how: Any,
) -> Found:
    loop = Loop(gpu or GpuQueue(), hold)
    for _ in range(steps):
        loop.step(forward, backward, **how)
    return loop.end()


@pytest.mark.parametrize("name", RUNS)
def test_the_share_of_recorded_launches(name: str) -> None:
    """The share in which the GPU waits for the host is within two points of what its timeline says."""
    recorded = RUNS[name]
    found = run(recorded["forward"], recorded["backward"], batches=recorded["batches"])
    assert found.host == pytest.approx(recorded["idle"], abs=0.02)
    for step in found.steps:
        assert sum(step.parts) == pytest.approx(step.seconds)
        assert min(step.parts) >= 0


def test_a_run_whose_host_is_ahead_is_never_held() -> None:
    gpu = GpuQueue()
    found = run([(6, 60)] * 200, [(6, 60)] * 400, gpu=gpu)
    trial_s = gpu.held_s
    assert trial_s < 1e-4
    assert found.host < 0.005


def test_holding_costs_a_quarter_of_a_second_at_most_in_a_short_run() -> None:
    gpu = GpuQueue()
    run([(100, 2)] * 300, [(100, 2)] * 600, steps=300, gpu=gpu)
    assert gpu.held_s < 0.4  # planned for a GPU of this clock, which may run slower
    assert gpu.held_s < 0.05 * gpu.host


def test_a_slow_host_is_not_held() -> None:
    """A step of seconds, as with an environment that is simulated in training_step, would cost seconds to hold."""
    gpu = GpuQueue()
    run([(2_000_000, 2)], [(10, 2)], steps=20, gpu=gpu)
    assert gpu.held_s < 1e-3


def test_a_gpu_that_counts_slowly_is_not_held_for_longer() -> None:
    """ROCm counts at 100 MHz: so the trial says how many cycles a second there are."""
    launches = [(10, 1)] * 200
    fast, slow = GpuQueue(hz=1.755e9), GpuQueue(hz=1e8)
    run(launches, launches, gpu=fast)
    run(launches, launches, gpu=slow)
    assert slow.held_s == pytest.approx(fast.held_s, rel=0.2)


@pytest.mark.parametrize("load_s", [3e-4, 1e-3, 5e-3])
@pytest.mark.parametrize("name", ["a small transformer, eager", "ResNet-50 of small images, eager"])
def test_the_time_to_load_the_kernel_that_spins_is_not_taken_for_its_speed(name: str, load_s: float) -> None:
    """CUDA loads a kernel at its first launch, while the events around it pass on an idle GPU."""
    recorded = RUNS[name]
    found = run(recorded["forward"], recorded["backward"], batches=recorded["batches"], gpu=GpuQueue(load_s=load_s))
    assert found.host == pytest.approx(recorded["idle"], abs=0.02)


def test_a_gpu_that_was_slow_at_first_is_held_long_enough_at_the_second_time() -> None:
    """Its clock rises after the trial."""
    launches = [(10, 1)] * 200
    loop = Loop(GpuQueue(hz=3.45e8))
    for number in range(24):
        loop.gpu.hz = 3.45e8 if number < 6 else 1.755e9
        loop.step(launches, launches)
    assert loop.end().host == pytest.approx(run(launches, launches, steps=24).host, abs=0.01)


def held_steps(
    loop: Loop, steps: int, stalls: Mapping[int, float], launches: Launches = ((10, 1),) * 5
) -> dict[int, float]:
    """How long each step was held, in seconds, in a run whose training_step stalls at some of them."""
    found = {}
    for number in range(1, steps + 1):
        before = loop.gpu.held_s
        loop.step([(1e6 * stalls.get(number, 1e-5), 1), *launches], launches)
        if loop.gpu.held_s - before > 1e-4:
            found[number] = loop.gpu.held_s - before
    return found


def test_a_gpu_that_slows_down_is_not_held_for_longer_for_ever() -> None:
    loop = Loop(GpuQueue())
    before = held_steps(loop, 20, {})
    loop.gpu.hz /= 5
    after = held_steps(loop, 120, {})
    assert [*before, *after] == [9, 17, 13, 45, 109]  # steps 33, 65 and 129 of the run
    assert after[13] > 4 * before[17]
    assert after[109] == pytest.approx(before[17], rel=0.1)


def test_holds_cost_what_they_lasted() -> None:
    """A GPU that slows down after the trial is held for twice as long as planned, and so it is held less often."""
    loop = Loop(GpuQueue())
    for number in range(100):
        loop.gpu.hz = 1.755e9 if number < 6 else 8.8e8
        loop.step([(1000, 2)] * 30, [(1000, 2)] * 60)
    assert 0.26 < loop.gpu.held_s < 0.3


def test_ranks_hold_the_same_steps_after_one_of_them_could_not() -> None:
    """A hold of one rank stalls all ranks, which wait for its gradients. So each holds when the others do."""
    one, other = (held_steps(Loop(GpuQueue()), 4200, stalls) for stalls in ({}, {8: 2.0, 128: 2.0, 2048: 2.0}))
    assert list(one) == [9, 17, 33, 65, 129, 257, 513, 1025, 2049, 3073, 4097]
    assert list(other) == [17, 33, 65, 257, 513, 1025, 3073, 4097]


def test_ranks_hold_the_same_steps_while_one_of_them_makes_up_for_the_last() -> None:
    assert list(held_steps(Loop(GpuQueue()), 140, {}, [(10, 8)] * 100)) == [9, 17, 33, 65, 129]


def test_no_step_is_held_for_long_however_old_the_run_is() -> None:
    loop = Loop(GpuQueue())
    held_steps(loop, 12, {})
    loop.gpu.host += 10 * 3600
    held = held_steps(loop, 120, {4: 60.0, 20: 0.8})  # steps 16 and 32 of the run
    assert list(held) == [53, 117]
    assert max(held.values()) < 1e-3


def test_a_held_step_and_those_that_make_up_for_it_are_left_out() -> None:
    loop = Loop(GpuQueue())
    for _ in range(40):
        loop.step([(9, 4)] * 300, [(9, 6)] * 600)
    steps = loop.end().steps
    assert 20 < len(steps) < 40
    assert max(step.seconds for step in steps[1:]) < 1.01 * min(step.seconds for step in steps[1:])


def test_a_validation_does_not_take_the_place_of_a_held_step() -> None:
    loop = Loop(GpuQueue())
    for _ in range(20):
        loop.step([(10, 1)] * 50, [(10, 1)] * 50)
        loop.recorder.resume()
    truth = run([(10, 1)] * 50, [(10, 1)] * 50, hold=False).truth
    assert loop.end().host == pytest.approx(truth, abs=0.03)


def test_where_the_host_waits_for_the_gpu_less_is_known_and_nothing_is_made_up() -> None:
    launches = [(10.0, 1.0)] * 200
    found = run(launches, launches, sync_after=100)
    assert 0.3 * found.truth < found.host <= found.truth + 0.01


def test_more_kernels_than_the_driver_queues_are_no_computing() -> None:
    launches = [(10.0, 0.5)] * 3000
    found = run(launches, launches, steps=40)
    assert 0.2 < found.host <= found.truth + 0.01


def test_larger_batches_later_are_not_taken_for_waiting() -> None:
    """What was learnt of small batches says nothing of large ones, so only the host's own time can be waiting."""
    loop = Loop(GpuQueue())
    for _ in range(12):
        loop.step([(10, 1)] * 50, [(10, 1)] * 50)
    loop.gpu.synchronize()
    loop.recorder.take()
    loop.kept.clear()
    for _ in range(3):
        loop.step([(10, 400)] * 50, [(10, 400)] * 50)
        loop.gpu.synchronize()  # as a progress bar that reads each loss
    steps = loop.recorder.take(wait=True)
    assert max(step.parts[Part.HOST] / step.seconds for step in steps) < 0.03


def test_without_a_hold_nothing_is_called_waiting_for_the_host() -> None:
    loop = Loop(GpuQueue(), hold=False)
    for _ in range(20):
        loop.step([(10, 1)] * 50, [(10, 1)] * 50)
    assert loop.end().host == 0.0


def test_the_reducers_share_is_taken_from_the_backward_pass() -> None:
    loop = Loop(GpuQueue(), hold=False)
    for _ in range(WARM_UP + 1):
        loop.step([(1, 100)] * 50, [(1, 100)] * 50)
    loop.meter.exposed_share = 0.25
    (step,) = loop.recorder.take(wait=True)
    backward, exposed = step.parts[Part.BACKWARD], step.parts[Part.COMMUNICATION]
    assert exposed == pytest.approx(0.25 * (backward + exposed))
    assert sum(step.parts) == pytest.approx(step.seconds)


def test_exposed_communication_is_a_share_of_the_whole_backward_pass_also_where_it_waits_for_the_host() -> None:
    loop = Loop(GpuQueue())
    for _ in range(12):
        loop.step([(10, 1)] * 50, [(10, 5)] * 50)
    loop.meter.exposed_share = 0.25
    step = loop.recorder.take(wait=True)[0]
    whole = step.parts[Part.BACKWARD] + step.parts[Part.COMMUNICATION] + 50 * 5e-6
    assert step.parts[Part.COMMUNICATION] == pytest.approx(0.25 * whole, rel=0.1)
    assert step.parts[Part.BACKWARD] == pytest.approx(0.25 * whole, rel=0.15)


LAUNCHES = st.lists(
    st.tuples(st.floats(2, 60), st.floats(0.5, 300)).map(lambda each: (each[0], each[1])), min_size=20, max_size=30
)


@settings(max_examples=8)
@given(forward=LAUNCHES, backward=LAUNCHES, batches=st.integers(1, 3), sync_after=st.none() | st.integers(0, 5))
def test_waiting_for_the_host_is_never_overstated_and_parts_sum_to_the_step(
    forward: Launches, backward: Launches, batches: int, sync_after: int | None
) -> None:
    found = run(forward, backward, steps=24, batches=batches, sync_after=sync_after)
    truth = run(forward, backward, steps=24, batches=batches, sync_after=sync_after, hold=False).truth
    # A launch takes 4 us to arrive, which is neither the host's time nor a kernel's, at each end of an interval.
    arriving = 2 * batches * 8e-6 * len(found.steps) / sum(step.seconds for step in found.steps)
    assert found.host <= truth + 0.01 + arriving
    if sync_after is None:
        assert found.host >= truth - 0.01 - arriving
    for step in found.steps:
        assert sum(step.parts) == pytest.approx(step.seconds)
        assert min(step.parts) >= -1e-12


class OneLate:
    """A clock of CUDA events of which one is not reached yet: over two streams, a later one may be reached first."""

    def __init__(self, late: int) -> None:
        self.count, self.late = -1, late

    def now(self) -> int:
        self.count += 1
        return self.count

    def has_passed(self, moment: int) -> bool:
        return moment != self.late

    def wait_for(self, moment: int) -> None:
        self.late = -1 if moment == self.late else self.late

    def seconds(self, start: int, end: int) -> float:
        if self.late in (start, end):
            raise RuntimeError("CUDA error: device not ready")
        return float(end - start)


@pytest.mark.parametrize("late", range(2, 9))
@pytest.mark.parametrize("meter", [DeviceMeter, None])
def test_a_step_is_read_when_all_of_its_events_are_reached(late: int, meter: Callable[..., DeviceMeter] | None) -> None:
    clock = OneLate(late)
    breakdown = Breakdown(meter(clock)) if meter else None
    if breakdown is not None:
        breakdown.begin(Phase.TRAINING)
    recorder = StepRecorder(clock, breakdown)
    for _ in range(2):
        recorder.batch_ready()
        if breakdown is not None:
            with breakdown.line("[Strategy]DDPStrategy.training_step"):
                pass
        recorder.batch_done(samples=4)
        recorder.step_done(keep=True)
    taken = recorder.take()
    assert len(taken) + len(recorder.take(wait=True)) == 2
