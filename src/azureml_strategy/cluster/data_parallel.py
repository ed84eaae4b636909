"""The data-parallel size of a Trainer, and the batch size of a replica."""

from __future__ import annotations

from typing import Any


def data_parallel_size(trainer: Any) -> int:
    """The number of replicas that read different samples, at least 1.

    Under DDP it is the world size. Under pipeline or tensor parallelism several ranks share one replica and read the
    same samples, so rates and global batches must count these ranks once. The number is the strategy's
    `num_replicas` for the distributed sampler: the data has one shard per replica.
    """
    sampler_arguments = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return int(sampler_arguments["num_replicas"]) if sampler_arguments else 1


def batch_size_of(loader: Any) -> int | None:
    """The samples in one batch of a replica, by whatever `train_dataloader` returned or its batch sampler.

    None if neither has the number.
    """
    sizes = (getattr(each, "batch_size", None) for each in (loader, getattr(loader, "batch_sampler", None)))
    return next((size for size in sizes if isinstance(size, int)), None)
