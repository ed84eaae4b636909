"""Samplers and loaders that resume at the exact sample, and the arguments that all data modules check or complete."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override

# More decoding processes than this only wait for one another. On a 96-core Azure VM each GPU gets 12.
_MOST_WORKERS = 16


class ResumableSampler(DistributedSampler[int]):
    """Shuffles by seed and epoch alone, and deals the samples out to the replicas one by one.

    Sample i of an epoch is the same for any number of replicas, so equal global batches hold equal samples. Of a global
    batch, replica r reads the samples r, r + replicas, and so on. Samples at the end that do not fill all replicas are
    left out.

    Args:
        dataset: what to draw from.
        num_replicas: how many replicas read different samples.
        rank: which of them this is.
        seed: of the shuffling; the same on all ranks.

    Attributes:
        resume_at: an epoch, and how many of its samples, over all replicas, were read before.
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
        """Return the samples of the epoch, int64, in the order of torch's DistributedSampler."""
        return torch.randperm(self._samples, generator=torch.Generator().manual_seed(self.seed + self.epoch))

    @property
    def first_sample(self) -> int:
        """Where the epoch begins, in samples of all replicas: above 0 only in the epoch that was interrupted."""
        epoch, samples = self.resume_at
        return samples if epoch == self.epoch else 0


class ResumableLoader(DataLoader[Any]):
    """A DataLoader that can resume in the middle of an epoch, also on another number of replicas.

    Lightning saves `state_dict` with a checkpoint and gives it back to `load_state_dict`. The loader draws from its own
    random numbers. torch's draws one of the process's in each epoch: a resumed epoch begins once more, which would
    shift all later draws.

    Args:
        dataset: what to read.
        sampler: a `ResumableSampler`.
        batch_size: samples per batch.
        options: further arguments of torch's DataLoader.
    """

    sampler: ResumableSampler
    _given = _begun_at = 0

    def __init__(self, dataset: Dataset[Any], *, sampler: ResumableSampler, batch_size: int, **options: Any) -> None:
        options = {"generator": torch.Generator().manual_seed(sampler.seed), "drop_last": True, **options}
        super().__init__(dataset, sampler=sampler, batch_size=batch_size, **options)

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's names the iterator's class
        self._given, self._begun_at = 0, self.sampler.first_sample
        for batch in super().__iter__():
            # Resume in this pass only: a loader that is shorter than another one restarts within the epoch.
            self.sampler.resume_at = (0, 0)
            # Count a batch when it is handed out: worker processes are some batches ahead.
            self._given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and how many of its samples, over all replicas, were read."""
        assert self.batch_size is not None
        samples = self._begun_at + self._given * self.batch_size * self.sampler.num_replicas
        return {"epoch": self.sampler.epoch, "samples": samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Start the epoch of `state` after its samples."""
        self._given, self._begun_at = 0, state["samples"]
        self.sampler.resume_at = (state["epoch"], state["samples"])
        self.sampler.set_epoch(state["epoch"])  # Lightning tells the epoch only after the workers have started


class TrainingSampler(ResumableSampler):
    """Gives each replica its own training images, none twice in an epoch.

    It yields draws, `epoch * len(dataset) + index`, which tell `TrainingImages` the epoch. A worker process that
    persists across epochs has no other way to know it.
    """

    @override
    def order(self) -> Tensor:
        return super().order() + self.epoch * self._samples


class EvaluationSampler(DistributedSampler[int]):
    """Gives every sample to exactly one replica, in order, and the same number to each replica.

    torch's own sampler repeats samples to make the shares equal, which counts them twice. This one pads with the index
    `len(dataset)`, a blank sample that no metric counts. Lightning does not replace it, as it is a DistributedSampler.

    Args:
        dataset: what to read.
        num_replicas: how many replicas read different samples.
        rank: which of them this is.
    """

    def __init__(self, dataset: Dataset[Any], num_replicas: int, rank: int) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=False, drop_last=False)
        self._padding = len(dataset)  # type: ignore[arg-type]  # torch's Dataset does not require len

    @override
    def __iter__(self) -> Iterator[int]:
        return (min(index, self._padding) for index in range(self.rank, self.total_size, self.num_replicas))


def replica(trainer: Trainer | None) -> tuple[int, int]:
    """Return how many replicas read different samples, and which of them this process is; one without a Trainer."""
    arguments = trainer.distributed_sampler_kwargs if trainer is not None else None
    return (arguments["num_replicas"], arguments["rank"]) if arguments else (1, 0)


def global_seed() -> int:
    """Return the seed of `seed_everything`, or 0, as Lightning does for the samplers that it makes."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def require(name: str, value: float, valid: bool, rule: str) -> None:
    """Refuse an argument that is out of range.

    Raises:
        ValueError: names the argument, the given value and the rule.
    """
    if not valid:
        raise ValueError(f"{name}={value!r}, but it must be {rule}.")


def default_num_workers(local_processes: int) -> int:
    """This process's share of the cores it may use, from 1 to 16.

    Args:
        local_processes: training processes on this machine.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    return min(max(cores // local_processes, 1), _MOST_WORKERS)
