"""Simulates the 1F1B schedule of a pipeline: when each stage computes which micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineTime:
    """What a pipeline takes for one batch, in seconds.

    Attributes:
        total_s: until the last backward pass is over.
        busiest_s: what the stage with the most work computes.
    """

    total_s: float
    busiest_s: float

    @property
    def bubble_s(self) -> float:
        """How long even the busiest stage waits: `(p - 1) / (m + p - 1)` of the whole with equal stages."""
        return self.total_s - self.busiest_s


def schedule_1f1b(
    forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int, sends_s: Sequence[float] = ()
) -> PipelineTime:
    """Run one batch through the stages, each doing one forward and one backward pass in turn (Narayanan et al. 2019,
    https://arxiv.org/abs/1806.03377; DeepSpeed's TrainSchedule is the same).

    Stage s of p begins with `min(p - 1 - s, m)` forward passes, then alternates, then ends with backward passes.

    Args:
        forward_s: seconds of a micro-batch's forward pass, of each stage.
        backward_s: the same of its backward pass.
        micro_batches: m, pieces of the batch.
        sends_s: seconds from each stage to the next one, and back; a stage waits for what it gets.
    """
    stages = len(forward_s)
    sends = list(sends_s) or [0.0] * (stages - 1)
    orders = [_order(stages - 1 - stage, micro_batches) for stage in range(stages)]
    # ends[stage][0 or 1][micro-batch]: when its forward or backward pass is over
    ends = [([-1.0] * micro_batches, [-1.0] * micro_batches) for _ in range(stages)]
    free, place = [0.0] * stages, [0] * stages
    left = 2 * micro_batches * stages
    while left:
        for stage in range(stages):
            while place[stage] < len(orders[stage]):
                backward, number = orders[stage][place[stage]]
                given = _arrival(ends, sends, stage, backward, number)
                if given is None:
                    break
                cost = backward_s[stage] if backward else forward_s[stage]
                free[stage] = ends[stage][backward][number] = max(free[stage], given) + cost
                place[stage] += 1
                left -= 1
    work = [micro_batches * (one + other) for one, other in zip(forward_s, backward_s, strict=True)]
    return PipelineTime(max(free), max(work))


def _order(later_stages: int, micro_batches: int) -> list[tuple[int, int]]:
    """What a stage does: (0, i) is the forward pass of micro-batch i, (1, i) its backward pass."""
    first = min(later_stages, micro_batches)
    steps = [(0, number) for number in range(first)]
    for number in range(micro_batches - first):
        steps += [(0, first + number), (1, number)]
    return steps + [(1, number) for number in range(micro_batches - first, micro_batches)]


def _arrival(
    ends: Sequence[tuple[list[float], list[float]]], sends: Sequence[float], stage: int, backward: int, number: int
) -> float | None:
    """When a stage has what a pass needs; None if that is not known yet."""
    if backward:
        before, sent = (stage + 1, sends[stage]) if stage + 1 < len(ends) else (stage, 0.0)
        needed = ends[before][1 if before > stage else 0][number]
    elif stage == 0:
        return 0.0
    else:
        needed, sent = ends[stage - 1][0][number], sends[stage - 1]
    return None if needed < 0 else needed + sent
