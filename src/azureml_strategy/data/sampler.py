"""Which samples each process reads."""

from __future__ import annotations

import os
from collections.abc import Iterator

from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DistributedSampler
from typing_extensions import override

from azureml_strategy.data.images import EvaluationImages
from azureml_strategy.data.position import ResumableSampler
from azureml_strategy.data.text import TokenSequences


class TrainingSampler(ResumableSampler):
    """Gives each replica its own training images, none twice in an epoch.

    It yields draws, `epoch * len(dataset) + index`, which tell `TrainingImages` the epoch: a worker process
    that lives on has no other way of knowing.
    """

    @override
    def order(self) -> Tensor:
        return super().order() + self.epoch * self._samples


class EvaluationSampler(DistributedSampler[int]):
    """Gives every sample to exactly one replica, in order, and all replicas equally many.

    torch's own sampler repeats samples to make the shares equal, which counts them twice; this one pads with the
    index `len(dataset)`, a blank sample that no metric counts. As a DistributedSampler it is left in place by
    Lightning.

    Args:
        dataset: what to read.
        num_replicas: how many replicas read different samples.
        rank: which of them this is.
    """

    def __init__(self, dataset: EvaluationImages | TokenSequences, num_replicas: int, rank: int) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=False, drop_last=False)
        self._padding = len(dataset)

    @override
    def __iter__(self) -> Iterator[int]:
        return (min(index, self._padding) for index in range(self.rank, self.total_size, self.num_replicas))


def replica(trainer: Trainer | None) -> tuple[int, int]:
    """How many replicas read different samples, and which of them this process is; one without a Trainer."""
    arguments = trainer.distributed_sampler_kwargs if trainer is not None else None
    return (arguments["num_replicas"], arguments["rank"]) if arguments else (1, 0)


def global_seed() -> int:
    """The seed of Lightning's `seed_everything`, or 0, as Lightning takes it for the samplers it makes."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))
