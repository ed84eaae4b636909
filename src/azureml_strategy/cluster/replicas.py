"""How many copies of the model read different samples."""

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
