"""How many copies of the model read different samples, and how many of them at once."""

from __future__ import annotations

from typing import Any


def data_parallel_size(trainer: Any) -> int:
    """The number of replicas that read different samples.

    Under DDP it is the world size; under a pipeline or tensor parallelism several ranks share one replica and
    read the same samples, so rates and global batches must count them once. The strategy's own sampler arguments
    say how many shards the data has, which is the same number.

    Args:
        trainer: a `lightning.pytorch.Trainer`.

    Returns:
        At least 1.
    """
    sampler_arguments = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return int(sampler_arguments["num_replicas"]) if sampler_arguments else 1


def batch_size_of(loader: Any) -> int | None:
    """Samples of a batch of one replica, as its data loader or that one's batch sampler says; None if neither does.

    Args:
        loader: whatever `train_dataloader` returns.
    """
    sizes = (getattr(each, "batch_size", None) for each in (loader, getattr(loader, "batch_sampler", None)))
    return next((size for size in sizes if isinstance(size, int)), None)
