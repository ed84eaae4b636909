"""Samplers and loaders that resume at the exact sample, and the arguments that all data modules check or complete."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler
from typing_extensions import override

from azureml_strategy.data.shard_index import ReadsAhead

# More decoding processes than this only wait for one another. On a 96-core Azure VM each GPU gets 12.
_MOST_WORKERS = 16
# Seconds that a worker may take for one batch. A mount that stopped answering must end the run, not stall it forever.
_BATCH_TIMEOUT = 600


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
        return iter(self._share(self.order()[self.first_sample :]).tolist())

    def order(self) -> Tensor:
        """Return the samples of the epoch, int64, in the order of torch's DistributedSampler."""
        return torch.randperm(self._samples, generator=torch.Generator().manual_seed(self.seed + self.epoch))

    @property
    def first_sample(self) -> int:
        """Where the epoch begins, in samples of all replicas: above 0 only in the epoch that was interrupted."""
        epoch, samples = self.resume_at
        return samples if epoch == self.epoch else 0

    def depends_on(self) -> dict[str, Any]:
        """Return what the order depends on, beside the epoch."""
        return {"shuffle": type(self).__name__, "seed": self.seed, "length": self._samples}

    def following(self) -> Tensor:
        """Return what this replica reads in the next epoch, int64."""
        epoch = self.epoch
        try:
            self.epoch = epoch + 1
            return self._share(self.order())
        finally:
            self.epoch = epoch

    def _share(self, order: Tensor) -> Tensor:
        complete = len(order) - len(order) % self.num_replicas
        return order[self.rank : complete : self.num_replicas]


class PlannedLoader(DataLoader[Any]):
    """A DataLoader that tells its data set which samples come next, so that they are fetched before they are needed.

    It does so with samplers of this package, and torch's sequential and distributed ones: their order is the same
    however often it is asked for. With another sampler it is torch's DataLoader.
    """

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's names the iterator's class
        data = self.dataset
        ours = isinstance(self.sampler, (ResumableSampler, EvaluationSampler))
        repeatable = ours or type(self.sampler) in (SequentialSampler, DistributedSampler)
        if not isinstance(data, ReadsAhead) or not repeatable:
            yield from super().__iter__()
            return
        numbers = np.fromiter(self.sampler, np.int64)
        following = getattr(self.sampler, "following", None)
        data.expect(numbers, numbers if following is None else following().numpy())
        for given, batch in enumerate(super().__iter__(), start=1):
            # Announced when it is handed out: worker processes are some batches ahead.
            data.reached(given * (self.batch_size or 1))
            yield batch


class ResumableLoader(PlannedLoader):
    """A DataLoader that can resume in the middle of an epoch, also on another number of replicas.

    Lightning saves `state_dict` with a checkpoint and gives it back to `load_state_dict`. Where the samples of a step
    change in number, Lightning has to be told as well how many steps are left: `JobCheckpoint` and `ElasticRestart` do.
    The loader draws from its own random numbers. torch's draws one of the process's in each epoch: a resumed epoch
    begins once more, which would shift all later draws.

    With `overfit_batches`, Lightning replaces the sampler by a sequential one. Then this is torch's DataLoader.

    Args:
        dataset: what to read.
        sampler: a `ResumableSampler`.
        batch_size: samples per batch.
        options: further arguments of torch's DataLoader.
    """

    sampler: ResumableSampler
    _given = _begun_at = _epoch = 0

    def __init__(self, dataset: Dataset[Any], *, sampler: ResumableSampler, batch_size: int, **options: Any) -> None:
        seed = getattr(sampler, "seed", global_seed())
        options = {"generator": torch.Generator().manual_seed(seed), "drop_last": True, **options}
        super().__init__(dataset, sampler=sampler, batch_size=batch_size, **options)

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's names the iterator's class
        if not isinstance(self.sampler, ResumableSampler):
            yield from super().__iter__()
            return
        self._given, self._begun_at, self._epoch = 0, self.sampler.first_sample, self.sampler.epoch
        for batch in super().__iter__():
            # Resume in this pass only: a loader that is shorter than another one restarts within the epoch.
            self.sampler.resume_at = (0, 0)
            # Count a batch when it is handed out: worker processes are some batches ahead.
            self._given += 1
            yield batch
        self.sampler.resume_at = (0, 0)  # also after a pass that was resumed at its end, and so had no batch

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, how many of its samples, over all replicas, were read, and what their order depends on."""
        if not isinstance(self.sampler, ResumableSampler):
            return {"epoch": 0, "samples": 0}
        assert self.batch_size is not None
        samples = self._begun_at + self._given * self.batch_size * self.sampler.num_replicas
        if self.sampler.epoch != self._epoch:  # the next epoch was set, and has not begun
            samples = self.sampler.first_sample
        return {"epoch": self.sampler.epoch, "samples": samples, "order": self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the epoch of `state` after its samples. Warn if they were read in another order."""
        if not isinstance(self.sampler, ResumableSampler):
            return
        self._given, self._begun_at, self._epoch = 0, state["samples"], state["epoch"]
        self.sampler.resume_at = (state["epoch"], state["samples"])
        self.sampler.set_epoch(state["epoch"])  # Lightning tells the epoch only after the workers have started
        before, now = state.get("order", {}), self._order()
        changed = [f"{name} {before[name]} is now {now.get(name)}" for name in before if before[name] != now.get(name)]
        # What does not fill a batch on all replicas is left out at the end of an epoch.
        left: int = self.sampler.depends_on()["length"] - state["samples"]
        goes_on = left >= (self.batch_size or 0) * self.sampler.num_replicas
        if changed and state["samples"] and goes_on:
            rank_zero_warn(
                f"The checkpoint was written after {state['samples']} samples of epoch {state['epoch']}, in an order "
                f"that is not the present one: {'; '.join(changed)}. So some samples of this epoch are read twice, and "
                "others not at all. Go on with what the run began with, or accept it for this epoch."
            )

    def _order(self) -> dict[str, Any]:
        return {**self.sampler.depends_on(), "data": getattr(self.dataset, "digest", None)}


class TrainingSampler(ResumableSampler):
    """Gives each replica its own training images, none twice in an epoch.

    It yields draws, `epoch * len(dataset) + index`, which tell `TrainingImages` the epoch. A worker process that
    persists across epochs has no other way to know it.
    """

    @override
    def order(self) -> Tensor:
        return super().order() + self.epoch * self._samples


class WindowSampler(TrainingSampler):
    """Shuffles shards, and their samples within a window of some shards, for a set that no disk here can hold.

    At any time, samples are drawn from `window` shards: a disk that holds these few serves the training while each
    shard is read once an epoch. Like the full shuffle, the order depends on seed and epoch alone.

    The shards lie in a random order one after the other. A sample's place is drawn evenly between the beginning of
    the shard that lies `window - 1` shards before its own and the end of its own; sorted, these places are the order.

    Args:
        dataset: what to draw from.
        num_replicas: how many replicas read different samples.
        rank: which of them this is.
        seed: of the shuffling; the same on all ranks.
        shards: the number of each sample's shard, `(samples,)`.
        window: how many shards are drawn from at a time.
    """

    def __init__(
        self, dataset: Sized, num_replicas: int, rank: int, seed: int, shards: NDArray[Any], window: int
    ) -> None:
        super().__init__(dataset, num_replicas, rank, seed)
        self._shards = torch.from_numpy(shards.astype(np.int64))
        self._window = window

    @override
    def depends_on(self) -> dict[str, Any]:
        return {**super().depends_on(), "window": self._window}

    @override
    def order(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        place = torch.randperm(int(self._shards.max()) + 1, generator=generator)[self._shards].double()
        first = (place - self._window + 1).clamp(min=0)
        drawn = first + (place + 1 - first) * torch.rand(self._samples, generator=generator, dtype=torch.float64)
        return drawn.argsort(stable=True) + self.epoch * self._samples


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


def rank_0_if_different(trainer: Trainer, digest: str) -> str | None:
    """Compare a hash of the data on all ranks: return None if it is the same everywhere, else rank 0's on each rank."""
    first: str = trainer.strategy.broadcast(digest)
    return None if trainer.strategy.reduce_boolean_decision(first == digest) else first


def global_seed() -> int:
    """Return the seed of `seed_everything`, or 0, as Lightning does for the samplers that it makes."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def require(name: str, value: object, valid: bool, rule: str) -> None:
    """Refuse an argument that is out of range.

    Raises:
        ValueError: names the argument, the given value and the rule.
    """
    if not valid:
        raise ValueError(f"{name}={value!r}, but it must be {rule}.")


def loader_options(trainer: Trainer | None, batch_size: int, workers: int) -> dict[str, Any]:
    """Return the arguments of a DataLoader with so many worker processes; `trainer` is None outside of a Trainer."""
    return {
        "batch_size": batch_size,
        "num_workers": workers,
        "pin_memory": trainer.strategy.root_device.type == "cuda" if trainer is not None else torch.cuda.is_available(),
        "persistent_workers": workers > 0,
        "timeout": _BATCH_TIMEOUT if workers > 0 else 0,
    }


def default_num_workers(local_processes: int) -> int:
    """Return this process's share of the cores it may use, from 1 to 16, of so many training processes here."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    return min(max(cores // local_processes, 1), _MOST_WORKERS)
