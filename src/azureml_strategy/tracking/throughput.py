"""Measures the samples per second of the whole job from the samples that each rank counts, and sums a run up."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor
from typing_extensions import override

from azureml_strategy.cluster.data_parallel import data_parallel_size
from azureml_strategy.lightning_internals import accumulates, logged_step
from azureml_strategy.tracking.flops import flops_of, peak_flops
from azureml_strategy.tracking.step_timer import CudaClock, HostClock, Step, StepRecorder


class Totals(NamedTuple):
    """Sums over steps and ranks.

    Attributes:
        steps: steps, counted once for every rank.
        samples: samples, counted on every rank.
        seconds: time of the steps, added up over ranks.
        waited_s: the part of it spent waiting for data.
        flops: floating-point operations of the whole model, counted on every rank for its own batches.
    """

    steps: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0
    waited_s: float = 0.0
    flops: float = 0.0

    def plus(self, other: Totals) -> Totals:
        """The sum of both."""
        return Totals(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


_LOGGED = (
    "samples_per_second",
    "samples_per_second_per_device",
    "step_time_median_s",
    "step_time_p95_s",
    "data_wait_share",
    "mfu",
)


@dataclass(frozen=True)
class ThroughputSummary:
    """How fast a run trained, without warm-up, validation and checkpoints.

    Attributes:
        steps: optimizer steps measured on each rank.
        samples: different samples that all replicas read in these steps.
        seconds: time of these steps.
        samples_per_second: of the whole run, over all devices.
        samples_per_second_per_device: the same, divided by the number of devices (ranks).
        step_time_median_s: median time of an optimizer step on rank 0.
        step_time_p95_s: the time that 95 % of the steps of rank 0 did not exceed (nearest rank).
        data_wait_share: share of the step before its batches were on the device, 0 to 1, averaged over ranks.
        mfu: model FLOPs utilisation (Chowdhery et al. 2022, appendix B, https://arxiv.org/abs/2204.02311): the model's
            operations per second, divided by the peak of all devices, 0 to 1; None if either is unknown.
    """

    steps: int
    samples: float
    seconds: float
    samples_per_second: float
    samples_per_second_per_device: float
    step_time_median_s: float
    step_time_p95_s: float
    data_wait_share: float
    mfu: float | None = None

    def as_metrics(self, prefix: str) -> dict[str, float]:
        """The rates and times as metrics under `prefix/`, without those that are unknown."""
        figures = {f"{prefix}/{name}": getattr(self, name) for name in _LOGGED}
        return {name: value for name, value in figures.items() if value is not None}


def summarize(
    totals: Totals, step_times: Sequence[float], *, ranks: int, replicas: int, peak_flops: float | None = None
) -> ThroughputSummary:
    """Compute the figures of some steps.

    Ranks that share a replica read the same samples, so only `replicas / ranks` of the counted samples are different.
    The same holds for the operations. Ranks run side by side, so the elapsed time is the mean over ranks.

    Args:
        totals: sums over all ranks, of at least one step.
        step_times: seconds of each step on this rank; not empty.
        ranks: world size.
        replicas: data-parallel size.
        peak_flops: floating-point operations per second that one device can do, if known.
    """
    samples = totals.samples * replicas / ranks
    flops = totals.flops * replicas / ranks
    seconds = totals.seconds / ranks
    return ThroughputSummary(
        steps=round(totals.steps / ranks),
        samples=samples,
        seconds=seconds,
        samples_per_second=samples / seconds,
        samples_per_second_per_device=samples / seconds / ranks,
        step_time_median_s=statistics.median(step_times),
        step_time_p95_s=sorted(step_times)[math.ceil(0.95 * len(step_times)) - 1],
        data_wait_share=totals.waited_s / totals.seconds,
        mfu=flops / seconds / (ranks * peak_flops) if flops and peak_flops else None,
    )


def count_samples(batch: Any) -> int:
    """The leading dimension of the first tensor of a batch.

    Args:
        batch: a tensor, or a mapping or sequence (nested at will) that holds one.

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
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        found = (_leading_dimension(item) for item in batch)
        return next((samples for samples in found if samples is not None), None)
    return None


class ThroughputCallback(Callback):
    """Measures samples per second, step time and the wait for data, and logs them with the other metrics.

    A step is an optimizer step: with accumulated gradients it has several batches. Each rank counts the samples of the
    batches that it really got, and the counts are summed over ranks. A step lasts from the end of the previous one
    (this callback's `on_train_batch_end`) to its own end. Validation, checkpoints and the time between epochs belong to
    no step. The wait for data is the part before a batch is on the device: the data loader, the copy to the device, and
    whatever Lightning, loggers and callbacks after this one do between two batches.

    On a GPU the times are those of the GPU, from CUDA events, so a loader that keeps ahead of the GPU causes no wait.
    No step makes the host wait. With several ranks each window ends in one all-reduce of five numbers, which does.

    | metric, every `trainer.log_every_n_steps` or its first multiple from `minimum_window` on | meaning |
    |---|---|
    | throughput/samples_per_second | over all devices, in the window |
    | throughput/samples_per_second_per_device | divided by the world size |
    | throughput/step_time_median_s, throughput/step_time_p95_s | of rank 0, in seconds |
    | throughput/data_wait_share | 0 to 1, mean over ranks |
    | throughput/mfu | 0 to 1: the model's FLOPs over what all devices can do; not for an unknown GPU, nor on a CPU |

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
        self._totals = Totals()
        self._step_times = array("d")  # 8 bytes a step: a million steps are 8 MB
        self._steps = 0
        self._ranks = self._replicas = 1
        self._peak: float | None = None
        self._flops: Callable[[Any], float] | None = None

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
        # The module is still whole here: the strategy splits it later.
        self._peak = self.peak_flops or peak_flops(trainer.strategy.root_device, str(trainer.precision))
        self._flops = flops_of(pl_module) if self._peak and stage == "fit" else None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        on_gpu = trainer.strategy.root_device.type == "cuda"
        self._recorder = StepRecorder(CudaClock() if on_gpu else HostClock(self._clock))
        self._totals, self._step_times, self._steps, self.latest = Totals(), array("d"), 0, None
        self._ranks, self._replicas = trainer.world_size, data_parallel_size(trainer)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        # A multiple, so that the figures are logged at steps at which other metrics are logged too.
        self._window = every * math.ceil(self.minimum_window / every) if every else 0

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recorder.resume()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._recorder.batch_ready()

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
        # Lightning logs `self.log` values at this step, which is the same on every rank.
        step = logged_step(trainer)
        if self._window and (step + 1) % self._window == 0:
            self._close_window(trainer, step)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recorder.resume()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._recorder.discard_step()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._account(trainer, self._recorder.take(wait=True))

    def _close_window(self, trainer: Trainer, step: int) -> None:
        steps = self._recorder.take()
        totals = self._account(trainer, steps)
        if not steps:
            return
        self.latest = self._summarize(totals, [step.seconds for step in steps])
        metrics = self.latest.as_metrics("throughput")
        for logger in self._loggers(trainer):
            logger.log_metrics(metrics, step=step)

    def _loggers(self, trainer: Trainer) -> list[Logger]:
        return trainer.loggers

    def _over_ranks(self, trainer: Trainer, totals: Totals) -> Totals:
        # 64 bits: a long run's samples and seconds would lose digits in 32.
        tensor = torch.tensor(totals, dtype=torch.float64, device=trainer.strategy.root_device)
        reduced: torch.Tensor = trainer.strategy.reduce(tensor, reduce_op="sum")
        return Totals(*reduced.tolist())

    def _account(self, trainer: Trainer, steps: list[Step]) -> Totals:
        """Add the steps of all ranks to the totals of the run, and return the sums of these steps."""
        self._step_times.extend(step.seconds for step in steps)
        mine = Totals(
            len(steps),
            sum(step.samples for step in steps),
            sum(step.seconds for step in steps),
            sum(step.waited_s for step in steps),
            sum(step.flops for step in steps),
        )
        totals = mine if self._ranks == 1 else self._over_ranks(trainer, mine)
        self._totals = self._totals.plus(totals)
        return totals

    def _summarize(self, totals: Totals, step_times: Sequence[float]) -> ThroughputSummary:
        return summarize(totals, step_times, ranks=self._ranks, replicas=self._replicas, peak_flops=self._peak)


def find_throughput(trainer: Trainer) -> ThroughputCallback | None:
    """Return the trainer's `ThroughputCallback` that measures, if it has one."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((each for each in callbacks if isinstance(each, ThroughputCallback) and each.measures), None)
