"""Shares of the ranks, by property."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.data import EvaluationSampler, TrainingSampler
from azureml_strategy.data.sampler import global_seed, replica


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
