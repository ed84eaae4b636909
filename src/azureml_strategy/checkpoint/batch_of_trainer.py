"""The global batch of a Trainer: what its data loader, strategy and accumulation make of it."""

from __future__ import annotations

import math

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng

from azureml_strategy.checkpoint.global_batch import GlobalBatch
from azureml_strategy.cluster.data_parallel import batch_size_of, data_parallel_size


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
