"""The throughput figures, and how they are computed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


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
