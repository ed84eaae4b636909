"""Measures the samples per second of the whole job from the samples that each rank counts, and sums a run up."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.distributed import ReduceOp
from typing_extensions import override

from azureml_strategy.cluster.data_parallel import data_parallel_size
from azureml_strategy.lightning_internals import accumulates, logged_step
from azureml_strategy.tracking.timing.flops import Flops, flops_of, peak_flops
from azureml_strategy.tracking.timing.goodput import WallClock
from azureml_strategy.tracking.timing.meters import STEP_PARTS, Part
from azureml_strategy.tracking.timing.run_breakdown import RunBreakdown
from azureml_strategy.tracking.timing.steps import CudaClock, HostClock, Phase, Step, StepRecorder
from azureml_strategy.tracking.timing.stragglers import Slowest
from azureml_strategy.tracking.timing.summary import PartSpread, ThroughputSummary, Totals, summarize


def count_samples(batch: Any) -> int:
    """The leading dimension of the first tensor of a batch: a tensor, or a nested mapping or sequence that holds one.

    Raises:
        TypeError: the batch holds no tensor with a leading dimension.
    """
    samples = _leading_dimension(batch)
    if samples is None:
        raise TypeError(
            f"Cannot count the samples of a batch of type {type(batch).__name__}: it holds no tensor with a leading "
            "dimension, and throughput must count real samples. Say how to count them: "
            "ThroughputCallback(batch_size=lambda batch: len(batch.labels))."
        )
    return samples


def _leading_dimension(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    # list and tuple are the usual ones, and checking for them is faster than for any sequence.
    if isinstance(batch, (list, tuple, Sequence)) and not isinstance(batch, (str, bytes)):
        for item in batch:
            samples = _leading_dimension(item)
            if samples is not None:
                return samples
    return None


class ThroughputCallback(Callback):
    """Measures samples per second and what each step and the run spend their time on; logs it with the other metrics.

    A step is an optimizer step: with accumulated gradients it has several batches. Each rank counts the samples of the
    batches that it really got, and the counts are summed over ranks. A step lasts from the end of the previous one
    (this callback's `on_train_batch_end`) to its own end. Validation, checkpoints and the time between epochs belong to
    no step. The wait for data is the part before a batch is on the device: the data loader, the copy to the device, and
    whatever Lightning, loggers and callbacks after this one do between two batches.

    On a GPU the times are those of the GPU, from CUDA events, so a loader that keeps ahead of the GPU causes no wait.
    No step makes the host wait. With several ranks each window ends in one all-reduce of a few numbers, which does.

    It logs every `trainer.log_every_n_steps`, or its first multiple from `minimum_window` on:

    - `throughput/samples_per_second`: over all devices, in the window
    - `throughput/samples_per_second_per_device`: divided by the world size
    - `throughput/step_time_median_s`, `throughput/step_time_p95_s`: of rank 0, in seconds
    - `throughput/data_wait_share`: 0 to 1, mean over ranks
    - `throughput/mfu`: 0 to 1, the model's FLOPs over what all devices can do; not for an unknown GPU, nor on a CPU
    - `step/data_wait_share`, copy, forward, forward_wait, backward, communication, bubble, ...: parts of it, 0 to 1
    - `ranks/compute_s_min`, _median, _max, `ranks/data_wait_s_max`, `ranks/slow`: what ranks differ in
    - `time/startup_s`, training_s, validation_s, checkpoint_s, redone_s, other_s, wall_s, goodput: of the run so far

    FLOPs are those of the whole model on the batches, however the strategy splits it and whatever it recomputes. They
    come from the module's own `training_flops(batch)`; otherwise torch counts them if the module has `pipeline_batch`.
    Other modules have no MFU.

    Args:
        warmup_steps: steps at the start of each `fit` that are not measured: compilation, autotuning, first batches.
        unit: the name of a sample in the progress bar and the report, such as `images`.
        batch_size: counts the samples of a batch; by default the first tensor's leading dimension.
        clock: the host's clock in seconds, used if there is no GPU.
        minimum_window: minimum number of steps in a window. The median of one step says nothing, and five figures at
            each step would cost more than everything else that is logged.
        peak_flops: floating-point operations per second that one device can do at the precision of this run. None uses
            the vendor's data sheet, for the GPUs that Azure has.

    Attributes:
        latest: the figures of the last window; None before the first one has ended.
    """

    def __init__(
        self,
        warmup_steps: int = 5,
        unit: str = "samples",
        batch_size: Callable[[Any], int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        minimum_window: int = 10,
        peak_flops: float | None = None,
    ) -> None:
        super().__init__()
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} is negative; 0 measures from the first step on.")
        if minimum_window < 1:
            raise ValueError(f"minimum_window={minimum_window} holds no step; use 1 or more.")
        if peak_flops is not None and peak_flops <= 0:
            raise ValueError(f"peak_flops={peak_flops} is no speed; give FLOP/s of one device, such as 989.5e12.")
        self.minimum_window = minimum_window
        self.peak_flops = peak_flops
        self.warmup_steps = warmup_steps
        self.unit = unit
        self.latest: ThroughputSummary | None = None
        self._count = batch_size or count_samples
        self._clock = clock
        self._recorder = StepRecorder(HostClock(clock))
        self._breakdown: RunBreakdown | None = None
        self._unknown: frozenset[Part] = frozenset()
        self._totals = Totals()
        self._spread = PartSpread()
        self._step_times = array("d")  # 8 bytes a step: a million steps are 8 MB
        self._steps = 0
        self._ranks = self._replicas = 1
        self._flops: Flops | None = None

    @property
    def measures(self) -> bool:
        """Whether this callback measures the present run."""
        return True

    def summary(self) -> ThroughputSummary | None:
        """The figures of the whole `fit`; None if no step was measured, as in one shorter than the warm-up."""
        if not self._step_times:
            return None
        return self._summarize(self._totals, self._step_times)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Count the FLOPs now, while the module is whole: the strategy splits it later.
        device, precision = trainer.strategy.root_device, str(trainer.precision)
        self._flops = None
        if stage == "fit" and (self.peak_flops or peak_flops(device, precision)):
            self._flops = flops_of(pl_module)
        self._device, self._precision = device, precision
        if stage == "fit":
            # Not when the training starts, since a fit whose steps are all done already starts no training.
            self._totals, self._step_times, self._steps, self.latest = Totals(), array("d"), 0, None
            self._spread = PartSpread()
            self._close_breakdown()  # of a previous run that failed in a way that calls no hook
            self._breakdown = RunBreakdown(trainer, self._clock)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        on_gpu = trainer.strategy.root_device.type == "cuda"
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        # A multiple, so that the figures are logged at steps at which other metrics are logged too.
        self._window = every * math.ceil(self.minimum_window / every) if every else 0
        clock = CudaClock() if on_gpu else HostClock(self._clock)
        if self._breakdown is not None:
            self._breakdown.train(trainer, clock, self._window, self._loggers(trainer))
            self._unknown = self._breakdown.unknown
        self._recorder = StepRecorder(clock, self._breakdown.breakdown if self._breakdown is not None else None)
        self._ranks, self._replicas = trainer.world_size, data_parallel_size(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recorder.resume()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._recorder.batch_ready()
        if self._breakdown is not None:
            self._breakdown.batch_starts()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch is None:  # Lightning skipped the batch and did not call on_train_batch_start
            return
        self._recorder.batch_done(self._count(batch), self._flops(batch) if self._flops else 0.0)
        if accumulates(trainer):
            return
        self._steps += 1
        self._recorder.step_done(keep=self._steps > self.warmup_steps)
        if self._breakdown is not None:
            self._breakdown.step_done(trainer)
        # Lightning logs `self.log` values at this step, which is the same on every rank.
        step = logged_step(trainer)
        if self._window and (step + 1) % self._window == 0:
            self._close_window(trainer, step)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._breakdown is not None:
            self._breakdown.begin(Phase.VALIDATION)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._breakdown is not None:
            self._breakdown.begin(Phase.TRAINING)
        self._recorder.resume()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._recorder.discard_step()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._breakdown is not None:
            self._breakdown.read_reducer()
        steps = self._recorder.take(wait=True)
        if self._breakdown is not None:
            self._breakdown.last_step_done(trainer)
        self._account(trainer, steps)
        if self._breakdown is not None:
            self._breakdown.end(trainer, self._loggers(trainer))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close_breakdown()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close_breakdown()

    def wall_clock(self) -> WallClock | None:
        """What the wall clock of the run went into so far; None before `fit`."""
        return self._breakdown.wall_clock() if self._breakdown is not None else None

    def slowest_rank(self) -> Slowest | None:
        """The rank that took longest over the whole run, on rank 0; None if none stands out."""
        return self._breakdown.slowest() if self._breakdown is not None else None

    def longest_hook(self) -> str:
        """The hook that most of `step/other_share` went into, and its time; empty if no single one did."""
        return self._breakdown.longest_hook() if self._breakdown is not None else ""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_breakdown": None}  # a copy has no part in the run of this process

    def _close_breakdown(self) -> None:
        if self._breakdown is not None:
            self._breakdown.close()

    def _close_window(self, trainer: Trainer, step: int) -> None:
        if self._breakdown is not None:
            self._breakdown.read_reducer()
        steps = self._recorder.take()
        if self._breakdown is not None:
            self._breakdown.window(steps, step)
        totals = self._account(trainer, steps)
        if not steps:
            return
        self.latest = self._summarize(totals, [step.seconds for step in steps])
        metrics = self.latest.as_metrics("throughput")
        for logger in self._loggers(trainer):
            logger.log_metrics(metrics, step=step)
        if self._breakdown is not None:
            self._breakdown.log(trainer, self._loggers(trainer), step)

    def _loggers(self, trainer: Trainer) -> list[Logger]:
        return trainer.loggers

    def _over_ranks(self, trainer: Trainer, totals: Totals) -> Totals:
        # 64 bits: a long run's samples and seconds would lose digits in 32.
        tensor = torch.tensor(totals.to_numbers(), dtype=torch.float64, device=trainer.strategy.root_device)
        every_rank: Any = ReduceOp.SUM  # with "sum", our strategies count ranks that share samples only once
        reduced: torch.Tensor = trainer.strategy.reduce(tensor, reduce_op=every_rank)
        return Totals.from_numbers(reduced.tolist())

    def _account(self, trainer: Trainer, steps: list[Step]) -> Totals:
        """Add the steps of all ranks to the totals of the run, and return the sums of these steps."""
        self._step_times.extend(step.seconds for step in steps)
        for step in steps:
            self._spread.add(step.parts)
        parts = tuple(map(sum, zip(*(step.parts for step in steps), strict=True))) or (0.0,) * len(Part)
        mine = Totals(
            len(steps),
            sum(step.samples for step in steps),
            sum(step.seconds for step in steps),
            sum(step.waited_s for step in steps),
            sum(step.flops for step in steps),
            parts[: len(STEP_PARTS)],
        )
        totals = mine if self._ranks == 1 else self._over_ranks(trainer, mine)
        self._totals = self._totals.plus(totals)
        return totals

    def _summarize(self, totals: Totals, step_times: Sequence[float]) -> ThroughputSummary:
        peak = self.peak_flops
        if self._flops is not None and not peak:
            peak = peak_flops(self._device, self._precision, self._flops.convolutions)
        return summarize(
            totals,
            step_times,
            ranks=self._ranks,
            replicas=self._replicas,
            peak_flops=peak,
            unknown=self._unknown,
            spread=self._spread,
        )


def find_throughput(trainer: Trainer) -> ThroughputCallback | None:
    """Return the trainer's `ThroughputCallback` that measures, if it has one."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((each for each in callbacks if isinstance(each, ThroughputCallback) and each.measures), None)
