"""How many samples an optimizer step takes, over all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng

from azureml_strategy.cluster.data_parallel import batch_size_of, data_parallel_size


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


def running_global_batch(trainer: Trainer) -> GlobalBatch:
    """The global batch of a training that is under way."""
    batches = trainer.num_training_batches
    return GlobalBatch(
        batch_size=batch_size_of(trainer.train_dataloader),
        replicas=data_parallel_size(trainer),
        accumulation=trainer.accumulate_grad_batches,
        epoch_batches=None if batches == math.inf else int(batches),
    )


def configured_global_batch(trainer: Trainer) -> GlobalBatch:
    """The global batch that a Trainer would have, asked by a callback in `setup`: no loader is made yet."""
    source = trainer.fit_loop._data_source
    # a module that makes loaders may need its own setup for it, which comes after that of callbacks
    too_early = isinstance(source.instance, LightningModule) and is_overridden(
        "setup", source.instance, LightningModule
    )
    with isolate_rng():  # this loader is looked at and forgotten: the one that is read must draw the same numbers
        loader = source.dataloader() if source.is_defined() and not too_early else None
    return GlobalBatch(batch_size_of(loader), data_parallel_size(trainer), trainer.accumulate_grad_batches)
