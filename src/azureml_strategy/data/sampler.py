"""Samplers and loaders that know their place, so that a resumed run goes on at the exact sample."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override


class ResumableSampler(DistributedSampler[int]):
    """Shuffles by seed and epoch alone, and deals the samples out to the replicas one by one.

    Sample i of an epoch is the same for any number of replicas, so equal global batches hold equal samples: of a
    global batch, replica r reads the samples r, r + replicas, and so on. The last samples that do not fill all
    replicas are left out.

    Args:
        dataset: what to draw from.
        num_replicas: how many replicas read different samples.
        rank: which of them this is.
        seed: of the shuffling; the same on all ranks.

    Attributes:
        resume_at: epoch and the number of its samples, over all replicas, that were read before.
    """

    def __init__(self, dataset: Sized, num_replicas: int, rank: int, seed: int) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=True, seed=seed, drop_last=True)  # type: ignore[arg-type]
        self._samples = len(dataset)
        self.resume_at = (0, 0)

    @override
    def __iter__(self) -> Iterator[int]:
        order = self.order()[self.first_sample :]
        complete = len(order) - len(order) % self.num_replicas
        return iter(order[self.rank : complete : self.num_replicas].tolist())

    def order(self) -> Tensor:
        """The samples of the epoch, int64, as torch's DistributedSampler shuffles them."""
        return torch.randperm(self._samples, generator=torch.Generator().manual_seed(self.seed + self.epoch))

    @property
    def first_sample(self) -> int:
        """Where the epoch begins, counted in samples of all replicas: above 0 only in the one that was interrupted."""
        epoch, samples = self.resume_at
        return samples if epoch == self.epoch else 0


class ResumableLoader(DataLoader[Any]):
    """A DataLoader that an epoch can be taken up with in its middle, on another number of replicas too.

    `state_dict` and `load_state_dict` are what Lightning saves with a checkpoint and gives back. It draws from random
    numbers of its own where torch's takes one of the process's for each epoch: a resumed epoch begins once more, and
    would shift all that are drawn later.

    Args:
        dataset: what to read.
        sampler: a `ResumableSampler`.
        batch_size: samples of a batch.
        options: further arguments of torch's DataLoader.
    """

    sampler: ResumableSampler
    _given = _begun_at = 0

    def __init__(self, dataset: Dataset[Any], *, sampler: ResumableSampler, batch_size: int, **options: Any) -> None:
        options = {"generator": torch.Generator().manual_seed(sampler.seed), "drop_last": True, **options}
        super().__init__(dataset, sampler=sampler, batch_size=batch_size, **options)

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's says which class of iterator
        self._given, self._begun_at = 0, self.sampler.first_sample
        for batch in super().__iter__():
            # Of this pass only: one that is shorter than another loader begins again within the epoch.
            self.sampler.resume_at = (0, 0)
            # counted when it is handed out: worker processes are some batches ahead
            self._given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The epoch and its samples, over all replicas, that are read; whatever the number of replicas."""
        assert self.batch_size is not None
        samples = self._begun_at + self._given * self.batch_size * self.sampler.num_replicas
        return {"epoch": self.sampler.epoch, "samples": samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the epoch of `state` after its samples."""
        self._given, self._begun_at = 0, state["samples"]
        self.sampler.resume_at = (state["epoch"], state["samples"])
        self.sampler.set_epoch(state["epoch"])  # Lightning tells the epoch only after the workers have started


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

    def __init__(self, dataset: Dataset[Any], num_replicas: int, rank: int) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=False, drop_last=False)
        self._padding = len(dataset)  # type: ignore[arg-type]  # which torch does not ask of a Dataset

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
