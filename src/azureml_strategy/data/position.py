"""Where an interrupted epoch goes on, on any number of replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
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
