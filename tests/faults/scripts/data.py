"""Scripts that read their data in every way that Lightning allows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from tests.faults.scripts.common import (
    BATCH,
    Regressor,
    Training,
    numbers,
    rank_and_size,
    regression_data,
    train_loader,
    train_rows,
    training,
    validation_loader,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from azureml_strategy.data import ResumableLoader, ResumableSampler
from azureml_strategy.data.sampler import replica


def plain() -> Training:
    return training()


class InAModule(LightningDataModule):
    """A new plain loader each time that Lightning asks."""

    def train_dataloader(self) -> DataLoader[Any]:
        return train_loader()

    def val_dataloader(self) -> DataLoader[Any]:
        return validation_loader()


def reloaded() -> Training:
    made = training(reload_dataloaders_every_n_epochs=1)
    made.train = InAModule()
    return made


class Augmented(Dataset[Any]):
    """Random numbers of each of the three kinds, where the sample is read."""

    def __init__(self) -> None:
        self.x, self.y = numbers(train_rows())

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index] * random.uniform(0.8, 1.2) + 0.1 * torch.randn(self.x.shape[1])
        if np.random.rand() < 0.5:
            x = x.flip(0)
        return x, self.y[index]


def augmentation() -> Training:
    """In the training process."""
    made = training()
    made.train = train_loader(Augmented())
    return made


def worker_augmentation() -> Training:
    made = training()
    made.train = train_loader(Augmented(), num_workers=2)
    return made


def persistent_workers() -> Training:
    """Workers that live through all epochs: what they draw in one depends on all that they drew before."""
    made = training()
    made.train = train_loader(Augmented(), num_workers=2, persistent_workers=True)
    return made


class Stream(IterableDataset[Any]):
    """A rank's share of the rows, each epoch in another order; it knows where it is."""

    def __init__(self) -> None:
        self.x, self.y = numbers(train_rows())
        self.rank, self.size = rank_and_size()
        self.epoch, self.position = 0, 0

    def share(self) -> list[int]:
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return order[self.rank :: self.size]

    def __iter__(self) -> Iterator[Any]:
        if self.position >= len(self.share()):
            self.epoch, self.position = self.epoch + 1, 0
        for index in self.share()[self.position :]:
            self.position += 1
            yield self.x[index], self.y[index]


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.share())


class StatefulLoader(DataLoader[Any]):
    """What Lightning asks for: a loader with these two."""

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.dataset.epoch, "position": self.dataset.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.dataset.epoch, self.dataset.position = state["epoch"], state["position"]


def iterable_stateful() -> Training:
    made = training()
    made.train = StatefulLoader(Stream(), batch_size=BATCH)
    return made


def iterable_stateful_sized() -> Training:
    made = training()
    made.train = StatefulLoader(SizedStream(), batch_size=BATCH)
    return made


class Lines(IterableDataset[Any]):
    """A file that is read from its first line to its last, and shuffled a little; it knows nothing."""

    def __init__(self) -> None:
        self.x, self.y = numbers(train_rows())
        self.rank, self.size = rank_and_size()

    def __iter__(self) -> Iterator[Any]:
        held: list[Any] = []
        for index in range(self.rank, len(self.x), self.size):
            held.append((self.x[index], self.y[index]))
            if len(held) > 8:
                yield held.pop(random.randrange(len(held)))
        yield from held


class SizedLines(Lines):
    def __len__(self) -> int:
        return len(range(self.rank, len(self.x), self.size))


def iterable_plain() -> Training:
    made = training()
    made.train = DataLoader(Lines(), batch_size=BATCH)
    return made


def iterable_plain_sized() -> Training:
    made = training()
    made.train = DataLoader(SizedLines(), batch_size=BATCH)
    return made


class LearnsFromTwo(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x, y), (other, target) = batch["labelled"], batch["other"]
        loss = nn.functional.mse_loss(self(x), y) + 0.3 * nn.functional.mse_loss(self(other), target)
        self.log("train_loss", loss)
        return loss


def _other_data() -> TensorDataset:
    """9 batches and a bit, so that it comes round within an epoch of 15."""
    return TensorDataset(*numbers(38 * rank_and_size()[1], seed=3))


class TwoResumable(LightningDataModule):
    def train_dataloader(self) -> Any:
        return {"labelled": self._loader(regression_data(), 3), "other": self._loader(_other_data(), 4)}

    def val_dataloader(self) -> DataLoader[Any]:
        return validation_loader()

    def _loader(self, data: TensorDataset, seed: int) -> ResumableLoader:
        sampler = ResumableSampler(data, *replica(self.trainer), seed=seed)
        return ResumableLoader(data, sampler=sampler, batch_size=BATCH)


def two_resumable_loaders() -> Training:
    made = training(LearnsFromTwo())
    made.train = TwoResumable()
    return made


def two_plain_loaders() -> Training:
    made = training(LearnsFromTwo())
    made.train = {"labelled": train_loader(), "other": train_loader(_other_data())}
    return made


def two_loaders_min_size() -> Training:
    """Until the shorter one ends, by Lightning's own class."""
    made = training(LearnsFromTwo(), max_epochs=4)
    loaders = {"labelled": train_loader(), "other": train_loader(_other_data())}
    made.train = CombinedLoader(loaders, mode="min_size")
    return made
