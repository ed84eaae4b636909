"""A process's place among those that measure together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """One process of a group.

    Attributes:
        rank: rank inside the group.
        world_size: processes of the group.
        device: where its tensors are.
        group: None for all processes of the job.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Wait until every process of the group is here and its device idle."""
        # All-reduce, because `barrier` must be told the device and does not wait for it.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        self.synchronize()

    def highest(self, values: Sequence[float]) -> list[float]:
        """The highest value over the processes, at each position."""
        return self._combine(values, dist.ReduceOp.MAX)

    def lowest(self, values: Sequence[float]) -> list[float]:
        """The lowest value over the processes, at each position."""
        return self._combine(values, dist.ReduceOp.MIN)

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum over the processes, at each position."""
        return self._combine(values, dist.ReduceOp.SUM)

    def _combine(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        combined = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(combined, op=operation, group=self.group)
        return [float(value) for value in combined.tolist()]
