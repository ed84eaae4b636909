"""What of a batch is compared, and which ranks with which."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from azureml_strategy.strategies.replica_check.data_check import _Batch, _digests, _is_split, _same


@dataclass
class Item:
    value: Any


class Pair(NamedTuple):
    first: Any
    second: Any


def images(last_row: int = 0) -> torch.Tensor:
    """As loaders give them for channels_last; black up to the last row of each."""
    made = torch.zeros(16, 3, 64, 64)
    made[:, :, -1] = last_row
    return made.to(memory_format=torch.channels_last)


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


class Endless:
    def __init__(self) -> None:
        self.self = self


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"a": [x]}, lambda x: (1, UserDict(b=x)), Item, Plain])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(3), torch.tensor([0.0, 0.0, 1e-30])),
        (torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.ones(2, 3, 4, 4)),
        (images(), images(last_row=1)),
        (images().mT, images(last_row=1).mT),
        (images()[..., ::2], images(last_row=1)[..., ::2]),
        (images().to(torch.complex64), images(last_row=1).to(torch.complex64)),
        (torch.tensor(True), torch.tensor(False)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(0), torch.zeros(0, 2)),
        (torch.arange(10**5), torch.arange(10**5) + 1),
        (np.zeros(3), np.ones(3)),
        (np.float32(1), np.float32(2)),
        (np.array(["a", "b"]), np.array(["a", "c"])),
        (["a", b"b", 1, None], ["a", b"b", 2, None]),
        (Pair(1, torch.zeros(1)), Pair(1, torch.ones(1))),
    ],
)
def test_batches_are_told_apart(wrap: Any, one: Any, other: Any) -> None:
    first, again, second = _digests([_Batch(wrap(one)), _Batch(wrap(one)), _Batch(wrap(other))])
    assert first == again
    assert first != second


def test_any_batch_is_taken() -> None:
    sparse, nested = torch.eye(3).to_sparse(), torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])
    batches = [None, object(), Endless(), sparse, nested, torch.zeros(1, device="meta"), iter([1]), [[[[[[[[1]]]]]]]]]
    assert len(_digests([_Batch(batch) for batch in batches])) == len(batches)


def test_what_the_training_step_writes_into_the_batch_does_not_count() -> None:
    batch = torch.zeros(4)
    taken = _Batch(batch)
    batch += 1
    assert _digests([taken]) == _digests([_Batch(torch.zeros(4))])


def told(*ranks: tuple[int, str]) -> dict[int, dict[str, Any]]:
    return {rank: {"replica": replica, "batches": list(batches)} for rank, (replica, batches) in enumerate(ranks)}


@pytest.mark.parametrize(
    ("ranks", "same"),
    [
        ([(0, "ab"), (1, "ab"), (2, "cd"), (3, "ab")], [[0, 1, 3]]),
        ([(0, "ab"), (1, "ac")], []),
        ([(0, "ab"), (0, "ab"), (1, "cd"), (1, "cd")], []),  # two replicas of two ranks each
        ([(0, "ab"), (0, "ab"), (1, "ab"), (1, "ab")], [[0, 2]]),
        ([(0, "aa"), (1, "aa")], []),
        ([], []),
    ],
)
def test_only_different_replicas_are_compared(ranks: list[tuple[int, str]], same: list[list[int]]) -> None:
    assert _same(told(*ranks)) == same


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


def test_which_loaders_are_split() -> None:
    class Data:
        train_dataloader: Any

    data, trainer = TensorDataset(torch.zeros(4)), Data()
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0)
    split = DataLoader(data, sampler=sampler)
    batches = torch.utils.data.BatchSampler(sampler, 2, drop_last=False)
    for loaders, expected in (
        (split, True),
        (DataLoader(data, batch_sampler=batches), True),
        (DataLoader(data, shuffle=True), False),
        (DataLoader(Stream()), False),
        ([split, DataLoader(Stream())], False),
        ({"a": split, "b": split}, True),
        (range(3), False),
    ):
        trainer.train_dataloader = loaders
        assert _is_split(trainer) is expected  # type: ignore[arg-type]
