"""Count the samples of an optimizer step over all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng

from azureml_strategy.cluster.data_parallel import batch_size_of, data_parallel_size
from azureml_strategy.lightning_internals import training_source


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step.

    Attributes:
        batch_size: samples in a batch of one replica; None if the data loader does not tell.
        replicas: data-parallel size; with pipeline or tensor parallelism it is smaller than the world size.
        accumulation: batches of each replica in a step.
        epoch_batches: batches of each replica in an epoch; None if the data loader has no length.
    """

    batch_size: int | None
    replicas: int
    accumulation: int
    epoch_batches: int | None = None

    @property
    def size(self) -> int:
        """Samples in a step; batches if the batch size is not known."""
        return self.round_size * self.accumulation

    @property
    def round_size(self) -> int:
        """Samples in one batch of every replica; batches if the batch size is not known."""
        return (self.batch_size or 1) * self.replicas

    @property
    def epoch_steps(self) -> int | None:
        """Optimizer steps in an epoch, rounded up because Lightning always steps after the last batch."""
        return None if self.epoch_batches is None else math.ceil(self.epoch_batches / self.accumulation)

    def __str__(self) -> str:
        size = "batches of unknown size" if self.batch_size is None else f"batch size {self.batch_size}"
        return f"{size} x {self.replicas} data-parallel rank(s) x accumulation {self.accumulation}"

    def as_known_by(self, other: GlobalBatch) -> GlobalBatch:
        """Count in batches if either side does not know its batch size; all batches then count as equally large."""
        return replace(self, batch_size=None) if other.batch_size is None else self

    def batches_for_one_of(self, other: GlobalBatch) -> Fraction:
        """The number of batches of a replica that hold as many samples as one batch under the other."""
        return Fraction(other.round_size, self.round_size)


def running_global_batch(trainer: Trainer) -> GlobalBatch:
    """The global batch of a running training."""
    batches = trainer.num_training_batches
    return GlobalBatch(
        batch_size=batch_size_of(trainer.train_dataloader),
        replicas=data_parallel_size(trainer),
        accumulation=trainer.accumulate_grad_batches,
        epoch_batches=None if batches == math.inf else int(batches),
    )


def configured_global_batch(trainer: Trainer) -> GlobalBatch:
    """The global batch that a Trainer is configured for. Callbacks call this in `setup`, before a loader exists."""
    source = training_source(trainer)
    # A module that makes the loader may need its own `setup` first, which runs after that of callbacks.
    too_early = isinstance(source.instance, LightningModule) and is_overridden(
        "setup", source.instance, LightningModule
    )
    with isolate_rng():  # this loader is discarded; the one that training reads must draw the same random numbers
        loader = source.dataloader() if source.is_defined() and not too_early else None
    return GlobalBatch(batch_size_of(loader), data_parallel_size(trainer), trainer.accumulate_grad_batches)
