from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities import imports
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import SimpleProfiler

from azureml_strategy.tracking import ThroughputCallback
from azureml_strategy.tracking.timing import run_breakdown
from azureml_strategy.tracking.timing.device_meter import DeviceMeter
from azureml_strategy.tracking.timing.meters import STEP_PARTS, HostMeter, Part, host_meter
from azureml_strategy.tracking.timing.span_profiler import SpanProfiler
from azureml_strategy.tracking.timing.steps import Breakdown, HostClock, Phase

NAMES = {
    "[_TrainingEpochLoop].train_dataloader_next": Part.DATA_WAIT,
    "[Strategy]DDPStrategy.batch_to_device": Part.COPY,
    "[Strategy]DDPStrategy.training_step": Part.FORWARD,
    "[Strategy]DDPStrategy.backward": Part.BACKWARD,
    "[LightningModule]Mine.optimizer_step": Part.OPTIMIZER,
    "[Callback]EarlyStopping{'monitor': 'x'}.on_train_batch_end": Part.OTHER,
    "pipeline_schedule": Part.BUBBLE,
}


class Clock:
    """Goes on by one second whenever it is read, and when a test says so."""

    time = 0.0
    tick = 0.0

    def __call__(self) -> float:
        self.time += self.tick
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(clock: Clock) -> Breakdown:
    breakdown = Breakdown(clock=clock)
    breakdown.begin(Phase.TRAINING)
    return breakdown


def seconds(run: Breakdown) -> dict[Part, float]:
    run.flush()
    return {part: run.totals[part] for part in Part if run.totals[part]}


def test_time_belongs_to_the_innermost_name_that_means_a_part(run: Breakdown, clock: Clock) -> None:
    clock.time += 1
    with run.line("[LightningModule]Mine.optimizer_step"):
        clock.time += 2
        with run.line("[Strategy]DDPStrategy.training_step"):
            clock.time += 4
            with run.line("a user's own span"):
                clock.time += 8
            with run.line("[Callback]Mine.on_before_zero_grad"):
                clock.time += 16
        with run.line("[Strategy]DDPStrategy.backward"):
            clock.time += 32
    assert seconds(run) == {
        Part.OTHER: 1 + 16,
        Part.OPTIMIZER: 2,
        Part.FORWARD: 4 + 8,
        Part.BACKWARD: 32,
    }
    assert run.lines["a user's own span"].seconds == 8
    assert run.lines["[Callback]Mine.on_before_zero_grad"].seconds == 16
    assert run.lines["[Strategy]DDPStrategy.training_step"].seconds == 4


@pytest.mark.parametrize(("name", "part"), NAMES.items())
def test_what_names_mean(run: Breakdown, clock: Clock, name: str, part: Part) -> None:
    with run.line(name):
        clock.time += 1
    assert seconds(run) == {part: 1}


def test_phases_make_parts_something_else(run: Breakdown, clock: Clock) -> None:
    with run.line("[Strategy]DDPStrategy.batch_to_device"):
        clock.time += 1
    run.begin(Phase.VALIDATION)
    with run.line("[Strategy]DDPStrategy.batch_to_device"):
        clock.time += 2
        with run.line("save_checkpoint"):
            clock.time += 4
    run.begin(Phase.ENDING)
    clock.time += 8
    assert seconds(run) == {Part.COPY: 1, Part.VALIDATION: 2, Part.CHECKPOINT: 4, Part.ENDING: 8}


def test_the_time_before_belongs_to_the_start(clock: Clock) -> None:
    clock.time = 100
    run = Breakdown(begun=60, clock=clock)
    clock.time += 5
    run.begin(Phase.TRAINING)
    clock.time += 1
    assert seconds(run) == {Part.STARTUP: 45, Part.OTHER: 1}


ACTIONS = st.lists(st.tuples(st.sampled_from([*NAMES, "x", "y"]), st.booleans(), st.integers(0, 5)), max_size=60)


@given(actions=ACTIONS)
def test_all_time_is_counted_once_whatever_starts_and_stops(actions: list[tuple[str, bool, int]]) -> None:
    """Also spans that are stopped twice, never, or in another order than they were started."""
    clock = Clock()
    run = Breakdown(clock=clock)
    run.begin(Phase.TRAINING)
    for name, starts, passes in actions:
        line = run.line(name)
        if starts:
            line.__enter__()
        else:
            line.__exit__()
        clock.time += passes
    run.flush()
    assert sum(run.totals) == clock.time
    lines = sum(line.seconds for line in run.lines.values())
    assert lines + run._base.seconds == clock.time


def test_a_script_that_names_each_step_does_not_fill_the_memory(run: Breakdown) -> None:
    for step in range(5000):
        with run.line(f"step {step}"):
            pass
    assert len(run.lines) <= 1001


def test_the_longest_hook_of_the_steps_is_found(run: Breakdown, clock: Clock) -> None:
    assert run.longest_hook() is None
    run.checkpoints_by("[Callback]ModelCheckpoint")
    for name, seconds in {
        "[Callback]ModelCheckpoint{'monitor': 'loss.end'}.on_train_batch_end": 9,
        "[Callback]main.<locals>.Ema{'key': 'a.b'}.on_train_batch_end": 3,
        "[LightningModule]Mine.on_before_optimizer_step": 2,
        "[Callback]Mine.on_validation_batch_end": 9,
        "[LightningModule]Mine.optimizer_step": 9,
    }.items():
        with run.line(name):
            clock.time += seconds
    found = run.longest_hook()
    assert found is not None
    assert found[0] == "Ema.on_train_batch_end"
    assert found[1].seconds == 3


def test_another_thread_is_left_alone(run: Breakdown, clock: Clock) -> None:
    own = SimpleProfiler()
    profiler = SpanProfiler(own, run)

    def load() -> None:
        with profiler.profile("[Strategy]DDPStrategy.backward"):
            clock.time += 1

    with profiler.profile("[Strategy]DDPStrategy.training_step"):
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert seconds(run) == {Part.FORWARD: 1}
    assert set(own.recorded_durations) == {"[Strategy]DDPStrategy.backward", "[Strategy]DDPStrategy.training_step"}


def test_marks_on_a_device(clock: Clock) -> None:
    """A part has the time between its marks; the host's own times do not count."""
    meter = DeviceMeter(HostClock(clock))
    run = Breakdown(meter, clock=Clock())
    run.begin(Phase.TRAINING)
    clock.time += 1
    with run.line("[_TrainingEpochLoop].train_dataloader_next"):
        clock.time += 2
    with run.line("[LightningModule]Mine.optimizer_step"):
        clock.time += 4
        with run.line("[Strategy]DDPStrategy.training_step"):
            clock.time += 8
            with run.line("[Callback]Mine.on_before_backward"):
                clock.time += 16
        clock.time += 32
    first = meter.seconds(run.cut_step())
    clock.time += 64
    second = meter.seconds(run.cut_step())
    assert {part: first[part] for part in Part if first[part]} == {
        Part.OTHER: 1,
        Part.DATA_WAIT: 2,
        Part.OPTIMIZER: 4 + 32,
        Part.FORWARD: 8 + 16,
    }
    assert {part: second[part] for part in Part if second[part]} == {Part.OTHER: 64}


def test_sleep_is_told_from_computing() -> None:
    meter = host_meter(world_size=2)
    assert isinstance(meter, HostMeter)
    event = threading.Event()
    meter.enter(Part.FORWARD)
    event.wait(0.2)
    meter.enter(Part.BACKWARD)
    sum(range(5_000_000))
    meter.leave()
    meter.leave()
    host = [0.0] * len(Part)
    host[Part.FORWARD], host[Part.BACKWARD] = 0.25, 60.0
    parts = meter.cut(host)
    meter.close()
    assert parts[Part.FORWARD_WAIT] == pytest.approx(0.2, abs=0.1)
    assert parts[Part.FORWARD] == pytest.approx(0.05, abs=0.05)
    assert sum(parts) == 60.25


MakeTrainer = Callable[..., Trainer]


class Asks(Callback):
    """What a script sees of its profiler while it trains."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.profiler = trainer.profiler
        self.durations = trainer.profiler.recorded_durations


def test_the_scripts_own_profiler_gets_everything(model: Any, data: Any, make_trainer: MakeTrainer) -> None:
    own, asks = SimpleProfiler(), Asks()
    trainer = make_trainer(callbacks=[ThroughputCallback(), asks], profiler=own, limit_val_batches=0)
    trainer.fit(model, data)
    assert asks.profiler is not own
    assert asks.durations is own.recorded_durations
    assert trainer.profiler is own
    assert len(own.recorded_durations["run_training_batch"]) == 20


class Labelled(SimpleProfiler):
    """A profiler of a script, with a field of its own."""

    label = ""


class Labels(Callback):
    """Sets a field of its profiler, and copies the profiler, while it trains."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.profiler, Labelled)
        assert isinstance(trainer.profiler, SpanProfiler)
        trainer.profiler.label = "set in fit"  # type: ignore[unreachable]
        self.copies = copy.deepcopy(trainer.profiler), pickle.loads(pickle.dumps(trainer.profiler))


def test_what_a_script_does_to_its_profiler_stays(model: Any, data: Any, make_trainer: MakeTrainer) -> None:
    own, labels = Labelled(), Labels()
    make_trainer(callbacks=[ThroughputCallback(), labels], profiler=own, limit_val_batches=0).fit(model, data)
    assert own.label == "set in fit"
    assert [each.label for each in labels.copies] == ["set in fit"] * 2
    assert {type(each) for each in labels.copies} == {SpanProfiler}


class Replaces(Callback):
    """Puts another profiler in place while it trains."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.profiler = SimpleProfiler()  # type: ignore[attr-defined]


def test_a_profiler_put_in_place_within_fit_hides_the_parts(model: Any, data: Any, make_trainer: MakeTrainer) -> None:
    throughput = ThroughputCallback(warmup_steps=0)
    trainer = make_trainer(callbacks=[throughput, Replaces()], limit_val_batches=0)
    trainer.fit(model, data)
    summary = throughput.summary()
    assert summary is not None
    assert summary.shares == {}  # not: all is spent in loggers and callbacks
    assert type(trainer.profiler) is SimpleProfiler


def test_a_notebooks_start_up_begins_with_its_fit(
    model: Any, data: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "_IS_INTERACTIVE", True)
    monkeypatch.setattr(run_breakdown, "_begun", [])
    throughput, begun = ThroughputCallback(), time.perf_counter()
    make_trainer(callbacks=[throughput], limit_val_batches=0).fit(model, data)
    wall = throughput.wall_clock()
    assert wall is not None
    assert wall.wall_s <= time.perf_counter() - begun


def test_the_profiler_is_given_back_after_an_exception(model: Any, data: Any, make_trainer: MakeTrainer) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ArithmeticError("in the user's callback")

    trainer = make_trainer(callbacks=[ThroughputCallback(), Fails()])
    own = trainer.profiler
    with pytest.raises(ArithmeticError):
        trainer.fit(model, data)
    assert trainer.profiler is own


class Manual(LightningModule):
    """Steps its optimizer by itself."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer, self.clock = torch.nn.Linear(1, 1), clock
        self.automatic_optimization = False
        # The clock goes on in the gradient's computation, and in the optimizer's step.
        self.layer.weight.register_hook(lambda _: self._pass(4))

    def _pass(self, seconds: float) -> None:
        self.clock.time += seconds

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self._pass(1)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(torch.ones(1, 1)).sum())
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: self._pass(16))
        return optimizer


def test_manual_optimization(data: Any, make_trainer: MakeTrainer, clock: Clock) -> None:
    throughput = ThroughputCallback(clock=clock, warmup_steps=0)
    make_trainer(callbacks=[throughput], limit_val_batches=0).fit(Manual(clock), data)
    summary = throughput.summary()
    assert summary is not None
    shares = {name: share for name, share in summary.shares.items() if share}
    assert shares == pytest.approx({"forward": 1 / 21, "backward": 4 / 21, "optimizer": 16 / 21})


class Timed(Callback):
    """Lets a clock go on in the hooks of a run."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_start(self, *_: Any) -> None:
        self.clock.time += 1

    def on_validation_batch_start(self, *_: Any) -> None:
        self.clock.time += 10

    def on_save_checkpoint(self, *_: Any) -> None:
        self.clock.time += 100

    def on_fit_start(self, *_: Any) -> None:
        self.clock.time += 1000

    def on_fit_end(self, *_: Any) -> None:
        self.clock.time += 10_000


def test_the_wall_clock_of_a_run(model: Any, data: Any, make_trainer: MakeTrainer, clock: Clock, tmp_path: Any) -> None:
    throughput = ThroughputCallback(clock=clock, warmup_steps=0)
    saver = ModelCheckpoint(tmp_path, save_on_train_epoch_end=True)
    trainer = make_trainer(
        callbacks=[Timed(clock), throughput, saver], max_epochs=2, enable_checkpointing=True, num_sanity_val_steps=1
    )
    trainer.fit(model, data, data)
    wall = throughput.wall_clock()
    assert wall is not None
    batches, validations = trainer.global_step, sum(int(each) for each in trainer.num_val_batches) * 2
    assert wall.startup_s == 1000 + 10 + 1  # the sanity check, and the first batch, which ends the start-up
    assert wall.training_s == batches - 1
    assert wall.validation_s == 10 * validations
    assert wall.checkpoint_s == 200
    assert wall.other_s == 10_000
    assert wall.wall_s == clock.time
    assert wall.goodput == wall.training_s / clock.time


def test_parts_of_a_step_are_those_of_metrics() -> None:
    assert [part.label for part in STEP_PARTS] == [
        *("data_wait", "copy", "forward", "forward_wait", "backward", "host"),
        *("communication", "bubble", "optimizer", "other"),
    ]


def test_what_sleeps_in_forward_is_no_communication() -> None:
    meter = HostMeter()
    breakdown = Breakdown(meter)
    breakdown.begin(Phase.TRAINING)
    with breakdown.line("[Strategy]DDPStrategy.training_step"):
        time.sleep(0.05)
    parts = breakdown.cut_step()
    meter.close()
    assert parts[Part.FORWARD_WAIT] >= 0.045
    assert not parts[Part.COMMUNICATION]
