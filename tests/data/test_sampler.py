from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler, SequentialSampler, TensorDataset

from azureml_strategy.data import EvaluationSampler, PlannedLoader, ResumableLoader, ResumableSampler, TrainingSampler
from azureml_strategy.data.sampler import default_num_workers, global_seed, replica, require
from azureml_strategy.data.synthetic import RepeatedBatch


def _loader(workers: int = 0, epoch: int = 0) -> ResumableLoader:
    rows = TensorDataset(torch.arange(40))
    sampler = ResumableSampler(rows, 1, 0, seed=7)
    sampler.set_epoch(epoch)
    return ResumableLoader(rows, sampler=sampler, batch_size=4, num_workers=workers)


def _place(loader: ResumableLoader) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["samples"]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_after_what_was_given(workers: int) -> None:
    whole = [batch[0].tolist() for batch in _loader(epoch=2)]
    stopped, again = _loader(workers, epoch=2), _loader(workers)
    for _, _ in zip(range(3), stopped, strict=False):
        pass
    again.load_state_dict(stopped.state_dict())
    assert [batch[0].tolist() for batch in again] == whole[stopped.state_dict()["samples"] // 4 :]


@pytest.mark.parametrize("workers", [0, 2])
def test_only_the_pass_that_was_left_goes_on_in_its_middle(workers: int) -> None:
    """A loader that is shorter than another one of the same epoch begins again."""
    stopped, again = _loader(workers, epoch=2), _loader(workers)
    for _, _ in zip(range(3), stopped, strict=False):
        pass
    again.load_state_dict(stopped.state_dict())
    rest, once_more = list(again), list(again)
    assert len(rest) < len(once_more) == 10
    assert _place(again) == (2, 40)


def test_images_go_on_with_the_draws_of_their_epoch() -> None:
    def draws(resume_at: tuple[int, int] = (0, 0)) -> list[int]:
        sampler = TrainingSampler(range(30), 2, 1, seed=7)
        sampler.set_epoch(2)
        sampler.resume_at = resume_at
        return list(sampler)

    assert draws((2, 12)) == draws()[6:]
    assert draws((1, 12)) == draws()
    assert all(60 <= draw < 90 for draw in draws())


def test_the_order_is_that_of_torchs_own_sampler() -> None:
    from torch.utils.data import DistributedSampler

    own = ResumableSampler(range(30), 4, 3, seed=7)
    torchs = DistributedSampler(range(30), 4, 3, seed=7, drop_last=True)  # type: ignore[var-annotated,arg-type]
    for epoch in range(3):
        own.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert list(own) == list(torchs)


@pytest.mark.parametrize("workers", [0, 1])
def test_beginning_an_epoch_takes_none_of_the_processs_random_numbers(workers: int) -> None:
    before = torch.get_rng_state()
    assert len(list(_loader(workers))) == 10
    assert torch.equal(torch.get_rng_state(), before)


def test_an_epoch_of_one_batch_is_as_long_as_what_was_left() -> None:
    batch = RepeatedBatch(torch.zeros(1), torch.zeros(1), 5)
    for _, _ in zip(range(2), batch, strict=False):
        pass
    again = RepeatedBatch(torch.zeros(1), torch.zeros(1), 5)
    again.load_state_dict({"given": 2})
    assert [len(list(again)), len(list(again))] == [3, 5]
    assert again.state_dict() == {"given": 5}
    again.load_state_dict(again.state_dict())
    assert len(list(again)) == 5, "it was at its end"


class _Sized(list):  # type: ignore[type-arg]
    """A data set of which the samplers only ask the length."""


def _training(samples: int, replicas: int, seed: int, epoch: int) -> list[list[int]]:
    shares = []
    for rank in range(replicas):
        sampler = TrainingSampler(_Sized(range(samples)), replicas, rank, seed)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
        assert len(shares[-1]) == len(sampler)
    return shares


@given(st.integers(0, 200), st.integers(1, 9))
def test_evaluation_reads_each_sample_once_and_pads_to_equal_shares(samples: int, replicas: int) -> None:
    data = _Sized(range(samples))
    samplers = [EvaluationSampler(data, replicas, rank) for rank in range(replicas)]  # type: ignore[arg-type]
    shares = [list(sampler) for sampler in samplers]
    assert {len(share) for share in shares} == {len(samplers[0])}
    counts = Counter(index for share in shares for index in share)
    padding = counts.pop(samples, 0)
    assert counts == Counter(range(samples))
    assert padding < replicas


@given(st.integers(1, 200), st.integers(1, 9), st.integers(0, 5), st.integers(0, 5))
def test_training_shares_are_equal_disjoint_and_tell_the_epoch(
    samples: int, replicas: int, seed: int, epoch: int
) -> None:
    shares = _training(samples, replicas, seed, epoch)
    assert {len(share) for share in shares} == {samples // replicas}
    draws = [draw for share in shares for draw in share]
    assert len(set(draws)) == len(draws)
    assert all(draw // samples == epoch for draw in draws)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    orders = {}
    for seed, epoch in ((0, 0), (0, 1), (7, 0)):
        (draws,) = _training(50, 1, seed, epoch)
        assert _training(50, 1, seed, epoch) == [draws]
        orders[seed, epoch] = tuple(draw % 50 for draw in draws)
    assert len(set(orders.values())) == 3


def test_without_a_trainer_there_is_one_replica() -> None:
    assert replica(None) == (1, 0)


def test_the_seed_is_lightnings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert global_seed() == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert global_seed() == 7


def test_an_argument_out_of_range_is_named() -> None:
    require("batch_size", 1, True, "1 or more")
    with pytest.raises(ValueError, match="batch_size=0, but it must be 1 or more"):
        require("batch_size", 0, False, "1 or more")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_workers_share_the_cores_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert [default_num_workers(processes) for processes in (1, 8)] == [1, 1]
    finally:
        os.sched_setaffinity(0, allowed)
    assert default_num_workers(1) == min(len(allowed), 16)


class _Cursor(Sampler[int]):
    """Each pass reads the next part of the data, so that to ask it twice would skip one."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        self.at += 2
        return iter(range(self.at - 2, self.at))

    def __len__(self) -> int:
        return 2


class _Told(Dataset[int]):
    """Takes note of what comes."""

    def __init__(self) -> None:
        self.told: list[list[int]] = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index

    def expect(self, numbers: NDArray[np.int64], following: NDArray[np.int64]) -> None:
        self.told.append(numbers.tolist())

    def reached(self, position: int) -> None:
        pass


def test_a_sampler_that_must_not_be_asked_twice_is_asked_once() -> None:
    data = _Told()
    loader = PlannedLoader(data, sampler=_Cursor(), batch_size=2)
    assert [batch.tolist() for _ in range(3) for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert data.told == []
    assert [batch.tolist() for batch in PlannedLoader(data, batch_size=3)] == [[0, 1, 2], [3, 4, 5]]
    assert data.told == [[0, 1, 2, 3, 4, 5]]


def test_a_checkpoint_of_another_order_is_told() -> None:
    stopped, rows = _loader(epoch=1), TensorDataset(torch.arange(40))
    for _, _ in zip(range(3), stopped, strict=False):
        pass
    state = stopped.state_dict()
    other = ResumableLoader(rows, sampler=ResumableSampler(rows, 1, 0, seed=8), batch_size=4)
    with pytest.warns(UserWarning, match=r"after 12 samples of epoch 1, .*seed 7 is now 8.* read twice"):
        other.load_state_dict(state)
    other = ResumableLoader(rows, sampler=TrainingSampler(rows, 1, 0, seed=7), batch_size=4)
    with pytest.warns(UserWarning, match=r"shuffle ResumableSampler is now TrainingSampler"):
        other.load_state_dict(state)
    _loader().load_state_dict(state)
    _loader().load_state_dict({"epoch": 1, "samples": 12})  # of a checkpoint before this was told


@pytest.mark.filterwarnings("error::UserWarning")
def test_at_the_end_of_an_epoch_another_order_takes_nothing_from_it() -> None:
    ended, rows = _loader(epoch=1), TensorDataset(torch.arange(43))
    list(ended)
    other = ResumableLoader(rows, sampler=ResumableSampler(rows, 1, 0, seed=8), batch_size=4)
    other.load_state_dict(ended.state_dict())  # three more samples would fill no batch


def test_an_epoch_that_was_told_and_has_not_begun_is_at_its_start() -> None:
    loader = _loader(epoch=0)
    list(loader)
    assert _place(loader) == (0, 40)
    loader.sampler.set_epoch(1)
    assert _place(loader) == (1, 0)


def test_with_overfit_batches_it_is_torchs_loader() -> None:
    rows = TensorDataset(torch.arange(40))
    loader = ResumableLoader(rows, sampler=SequentialSampler(rows), batch_size=4)  # type: ignore[arg-type]
    assert len(list(loader)) == 10
    loader.load_state_dict(loader.state_dict())
    assert next(iter(loader))[0].tolist() == [0, 1, 2, 3]
