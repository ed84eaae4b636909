"""Follows one `fit`: what its steps and its wall clock are spent on, and which ranks are slower than the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from azureml_strategy.cluster.job import read_job
from azureml_strategy.lightning_internals import is_interactive
from azureml_strategy.tracking.logger import JobMLFlowLogger
from azureml_strategy.tracking.timing.device_meter import DeviceMeter
from azureml_strategy.tracking.timing.goodput import STEPS_DONE, GoodputMeter, WallClock, process_age_s
from azureml_strategy.tracking.timing.meters import Clock, HostMeter, Meter, Part, ReducerTimes, host_meter
from azureml_strategy.tracking.timing.rank_times import RankTimes
from azureml_strategy.tracking.timing.span_profiler import install, remove
from azureml_strategy.tracking.timing.steps import Breakdown, Phase, Step
from azureml_strategy.tracking.timing.stragglers import Slowest

# Steps between two that DDP's reducer measures, in a run that logs nothing; DDP's own default.
_UNLOGGED_STEPS = 100
# A hook is named if it took this share of the part `OTHER` of the steps.
_MOST = 0.5
# When the first `fit` of this process began. The time from the start of the process until then belongs to that `fit`.
_begun: list[float] = []


class ManualBackward(Callback):
    """Adds the backward passes of manual optimization to a breakdown, because Lightning has no span for them."""

    def __init__(self, breakdown: Breakdown) -> None:
        self._breakdown = breakdown

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._breakdown.enter_after_hook("manual_backward")

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._breakdown.leave_before_hook("manual_backward")


class RunBreakdown:
    """The breakdown of one `fit`, from `setup` on. Until `close`, the Trainer's profiler reports to it what runs."""

    def __init__(self, trainer: Trainer, clock: Callable[[], float]) -> None:
        self._trainer = trainer
        self._is_real = clock is time.perf_counter
        begun = None
        # A notebook's kernel may have idled, or done something else, for hours.
        if self._is_real and not _begun and not is_interactive():
            begun = clock() - process_age_s()
            _begun.append(begun)
        self.breakdown = Breakdown(begun=begun, clock=clock)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        writers = [each.state_key for each in callbacks if isinstance(each, Checkpoint)]
        self.breakdown.checkpoints_by(*(f"[Callback]{name}." for name in writers))
        self._goodput = GoodputMeter(self.breakdown)
        self._reducer: ReducerTimes | None = None
        self._ranks: RankTimes | None = None
        self._trains = self._is_over = False
        self._final: WallClock | None = None
        self.unknown: frozenset[Part] = frozenset()
        install(trainer, self.breakdown)

    def train(self, trainer: Trainer, clock: Clock, every: int, loggers: Sequence[Logger]) -> None:
        """Prepare for the first step, once the process group exists. A window has `every` steps; 0 means no windows."""
        meter = self._choose_meter(trainer, clock, every)
        self.breakdown.measure_by(meter)
        if self._reducer is None and not isinstance(meter, HostMeter):
            self.unknown = frozenset({Part.COMMUNICATION})
        self._goodput = GoodputMeter(self.breakdown, _steps_before(trainer, loggers))
        if trainer.world_size > 1:
            self._ranks = RankTimes.join(trainer)
        if not trainer.lightning_module.automatic_optimization:
            trainer.callbacks.append(ManualBackward(self.breakdown))  # type: ignore[attr-defined]

    def batch_starts(self) -> None:
        """A batch starts. The first one ends the start-up."""
        if not self._trains:
            self._trains = True
            self.begin(Phase.TRAINING)

    def step_done(self, trainer: Trainer) -> None:
        """An optimizer step is done."""
        if self._goodput.may_redo:
            self._goodput.step_done(trainer.global_step)

    def begin(self, phase: Phase) -> None:
        """The run does something else from now on. A validation before training belongs to the start-up."""
        if self._trains:
            self.breakdown.begin(phase)

    def window(self, steps: list[Step], step: int) -> None:
        """Send the other ranks the times of a window's steps."""
        if self._ranks is not None and steps:
            self._ranks.add(steps, step)

    def read_reducer(self) -> None:
        """Read the exposed communication from DDP's reducer, for the steps that are read next."""
        meter = self.breakdown.meter
        if self._reducer is not None and isinstance(meter, DeviceMeter):
            meter.exposed_share = self._reducer.exposed_share()

    def last_step_done(self, trainer: Trainer) -> None:
        """The last step of this rank is done. Other ranks may still be in their last one."""
        self.breakdown.begin(Phase.ENDING)
        if self._ranks is not None and not trainer.is_global_zero:
            self._ranks.exchange()

    def end(self, trainer: Trainer, loggers: Sequence[Logger]) -> None:
        """Log a last time, with the last times of the other ranks, and keep the times of all ranks with the run."""
        if self._ranks is not None and trainer.is_global_zero:
            self._ranks.exchange()
        self.log(trainer, loggers, trainer.global_step)
        if self._ranks is not None:
            self._ranks.keep(trainer)

    def slowest(self) -> Slowest | None:
        """The rank that took longest over the whole run, if one stands out; on rank 0."""
        return self._ranks.slowest() if self._ranks is not None else None

    def longest_hook(self) -> str:
        """The hook that took most of the part `OTHER`, such as `Ema.on_train_batch_end, 4.1 ms a call`; or empty."""
        name, line = self.breakdown.longest_hook() or ("", None)
        if line is None or not line.seconds or line.seconds < _MOST * self.breakdown.totals[Part.OTHER]:
            return ""
        return f"{name}, {1e3 * line.seconds / line.calls:,.1f} ms a call"

    def log(self, trainer: Trainer, loggers: Sequence[Logger], step: int) -> None:
        """Log where the time of the run went, and how the ranks differ."""
        metrics = self._goodput.read().as_metrics() | {STEPS_DONE: float(trainer.global_step)}
        if self._ranks is not None:
            metrics |= self._ranks.report(trainer)
        for logger in loggers:
            logger.log_metrics(metrics, step=step)

    def wall_clock(self) -> WallClock:
        """Where the time of the run went so far."""
        return self._final or self._goodput.read()

    def close(self) -> None:
        """Give the Trainer its own profiler back."""
        if self._is_over:
            return
        self._is_over = True
        self._final = self._goodput.read()
        remove(self._trainer)
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        self._trainer.callbacks = [each for each in callbacks if not isinstance(each, ManualBackward)]  # type: ignore[attr-defined]
        if self._ranks is not None:
            self._ranks.close()
        if isinstance(self.breakdown.meter, HostMeter):
            self.breakdown.meter.close()
            self.breakdown.measure_by(Meter())

    def _choose_meter(self, trainer: Trainer, clock: Clock, every: int) -> Meter:
        model = trainer.strategy.model
        device = trainer.strategy.root_device.type
        if device == "cuda":
            if isinstance(model, DistributedDataParallel):
                self._reducer = ReducerTimes(lambda: trainer.strategy.model, every or _UNLOGGED_STEPS)
            return DeviceMeter(clock, torch.cuda._sleep)
        if device != "cpu" or not self._is_real:
            return Meter()
        return host_meter(trainer.world_size)


def _steps_before(trainer: Trainer, loggers: Sequence[Logger]) -> float:
    """Optimizer steps that previous attempts had done, if this one goes on with their run; known on rank 0."""
    job = read_job()
    goes_on = trainer.ckpt_path is not None or (job is not None and job.attempt > 0)
    run_loggers = [each for each in loggers if isinstance(each, JobMLFlowLogger)]
    if not goes_on or not run_loggers or not trainer.is_global_zero:
        return 0.0
    return run_loggers[0].metric_at_start(STEPS_DONE) or 0.0
