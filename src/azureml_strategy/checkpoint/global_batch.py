"""The samples of an optimizer step, and how the replicas share them out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction


@dataclass(frozen=True)
class GlobalBatch:
    """What one optimizer step learns from.

    Attributes:
        batch_size: samples of a batch of one replica; None where the data loader does not say.
        replicas: data-parallel size, which a pipeline and tensor parallelism make smaller than the world size.
        accumulation: batches of each replica.
        epoch_batches: batches of an epoch, of each replica; None where the data loader has no length.
    """

    batch_size: int | None
    replicas: int
    accumulation: int
    epoch_batches: int | None = None

    @property
    def size(self) -> int:
        """Samples of a step; batches where the batch size is not known."""
        return self.round_size * self.accumulation

    @property
    def round_size(self) -> int:
        """Samples that the replicas read with one batch each; batches where the batch size is not known."""
        return (self.batch_size or 1) * self.replicas

    @property
    def epoch_steps(self) -> int | None:
        """Optimizer steps of an epoch: Lightning steps after its last batch, too."""
        return None if self.epoch_batches is None else math.ceil(self.epoch_batches / self.accumulation)

    def __str__(self) -> str:
        size = "batches of unknown size" if self.batch_size is None else f"batch size {self.batch_size}"
        return f"{size} x {self.replicas} data-parallel rank(s) x accumulation {self.accumulation}"

    def as_known_by(self, other: GlobalBatch) -> GlobalBatch:
        """Counted in batches where one of the two does not know their size: they are taken for equally large."""
        return replace(self, batch_size=None) if other.batch_size is None else self

    def batches_for_one_of(self, other: GlobalBatch) -> Fraction:
        """How many batches of a replica hold the samples that one held under the other."""
        return Fraction(other.round_size, self.round_size)
