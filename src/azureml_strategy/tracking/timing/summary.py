"""The figures of some steps of all ranks: rates, times, and what the steps spent their time on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from azureml_strategy.tracking.timing.meters import STEP_PARTS, Part
from azureml_strategy.tracking.verdict import whole_shares


class Totals(NamedTuple):
    """Sums over steps and ranks.

    Attributes:
        steps: each counts once for every rank.
        waited_s: the part of `seconds` spent waiting for data.
        flops: floating-point operations of the whole model, counted on every rank for its own batches.
        parts: seconds of each of `STEP_PARTS`.
    """

    steps: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0
    waited_s: float = 0.0
    flops: float = 0.0
    parts: tuple[float, ...] = (0.0,) * len(STEP_PARTS)

    def plus(self, other: Totals) -> Totals:
        """The sum of both."""
        return Totals.from_numbers([a + b for a, b in zip(self.to_numbers(), other.to_numbers(), strict=True)])

    def times(self, factor: float) -> Totals:
        """All sums, multiplied by a factor."""
        return Totals.from_numbers([factor * each for each in self.to_numbers()])

    def to_numbers(self) -> list[float]:
        """All numbers in one list."""
        return [*self[:5], *self.parts]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Totals:
        """The totals of which `to_numbers` returned these numbers."""
        steps, samples, seconds, waited_s, flops, *parts = numbers
        return cls(steps, samples, seconds, waited_s, flops, tuple(parts))


class PartSpread:
    """How much the parts of a step differ from step to step, on this rank."""

    def __init__(self) -> None:
        self._steps = 0
        self._sums, self._squares = [0.0] * len(STEP_PARTS), [0.0] * len(STEP_PARTS)

    def add(self, parts: Sequence[float]) -> None:
        """Take one more step: seconds of each `Part`."""
        self._steps += 1
        for part, seconds in zip(STEP_PARTS, parts, strict=False):
            self._sums[part] += seconds
            self._squares[part] += seconds * seconds

    def errors(self) -> dict[str, float]:
        """The standard error of each part's share, by its label; empty before the second step."""
        whole = sum(self._sums)
        if self._steps < 2 or not whole:
            return {}
        errors = {}
        for part in STEP_PARTS:
            mean = self._sums[part] / self._steps
            deviation = math.sqrt(max(self._squares[part] / self._steps - mean * mean, 0.0))
            errors[part.label] = deviation * math.sqrt(self._steps) / whole
        return errors


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
        shares: part of the step, 0 to 1, averaged over ranks, by the label of each `Part` that is measured. They add up
            to 1; there are none if they do not.
        errors: standard errors of `shares`, from the spread of this rank's steps.
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
    shares: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)

    def as_metrics(self, prefix: str, step: str = "step") -> dict[str, float]:
        """The figures as metrics, without those that are unknown; `step` is the prefix of the shares of a step."""
        figures = {f"{prefix}/{name}": getattr(self, name) for name in _LOGGED}
        shares = {f"{step}/{part}_share": share for part, share in self.shares.items()}
        return {name: value for name, value in (figures | shares).items() if value is not None}


def summarize(
    totals: Totals,
    step_times: Sequence[float],
    *,
    ranks: int,
    replicas: int,
    peak_flops: float | None = None,
    unknown: frozenset[Part] = frozenset(),
    spread: PartSpread | None = None,
) -> ThroughputSummary:
    """Compute the figures of at least one step, from sums over all ranks and the seconds of each step on this rank.

    Ranks that share a replica read the same samples, so only `replicas / ranks` of the counted samples are different.
    The same holds for the operations. Ranks run side by side, so the elapsed time is the mean over ranks.

    Args:
        peak_flops: floating-point operations per second that one device can do, if known.
        unknown: parts of a step that are not measured.
        spread: of the parts of this rank's steps, if known.
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
        shares=_shares(totals.parts, unknown),
        errors=spread.errors() if spread is not None else {},
    )


# Parts that are shown only if they took some time.
_RARE = (Part.FORWARD_WAIT, Part.HOST, Part.BUBBLE)


def _shares(parts: Sequence[float], unknown: frozenset[Part]) -> dict[str, float]:
    whole = sum(parts)
    # If a script replaces the profiler within `fit`, all time counts as `OTHER`.
    if not whole or whole == parts[Part.OTHER]:
        return {}
    # An unknown part may still have some time from a span of its own, as a pipeline's reduction on a GPU.
    shown = [part for part in STEP_PARTS if parts[part] or part not in unknown.union(_RARE)]
    return whole_shares({part.label: parts[part] / whole for part in shown})
