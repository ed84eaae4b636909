"""The window shuffle: every sample once, few shards at a time, an honest mixture, and the same on any ranks."""

from __future__ import annotations

from collections import Counter
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from azureml_strategy.data import ResumableSampler, WindowSampler


def sampler(shards: NDArray[np.int64], window: int, replicas: int = 1, rank: int = 0, epoch: int = 0) -> WindowSampler:
    made = WindowSampler(range(len(shards)), replicas, rank, seed=5, shards=shards, window=window)
    made.set_epoch(epoch)
    return made


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20), window=st.integers(1, 25), epoch=st.integers(0, 3))
def test_each_sample_comes_once_from_few_shards(sizes: list[int], window: int, epoch: int) -> None:
    shards = np.repeat(np.arange(len(sizes)), sizes)
    order = np.array(list(sampler(shards, window, epoch=epoch))) - epoch * len(shards)
    assert sorted(order) == list(range(len(shards)))
    seen = shards[order]
    first = {shard: int(np.flatnonzero(seen == shard)[0]) for shard in set(seen.tolist())}
    last = {shard: int(np.flatnonzero(seen == shard)[-1]) for shard in first}
    for position in range(len(seen)):
        assert sum(first[shard] <= position <= last[shard] for shard in first) <= window + 1


@pytest.mark.parametrize("window", [1, 4, 100])
def test_global_batches_are_the_same_on_any_ranks(window: int) -> None:
    shards = np.repeat(np.arange(12), 20)

    def batches(replicas: int) -> list[list[int]]:
        shares = [list(sampler(shards, window, replicas, rank, epoch=1)) for rank in range(replicas)]
        of_rank = 8 // replicas
        steps = range(len(shares[0]) // of_rank)
        return [sorted(x for share in shares for x in share[step * of_rank : (step + 1) * of_rank]) for step in steps]

    assert batches(1) == batches(2) == batches(4)


def test_epochs_and_seeds_differ() -> None:
    shards = np.repeat(np.arange(6), 10)
    orders = [tuple(draw % 60 for draw in sampler(shards, 3, epoch=epoch)) for epoch in range(3)]
    assert len(set(orders)) == 3
    assert orders[1] == tuple(draw % 60 for draw in sampler(shards, 3, epoch=1))


def test_the_labels_of_batches_are_a_fair_draw() -> None:
    """Chi-square over 100 batches at 1 %, for a set that was shuffled when it was packed."""
    classes, samples, batch = 10, 12_800, 128
    labels = np.random.default_rng(0).permutation(np.arange(samples) % classes)
    shards = np.arange(samples) // 200
    order = np.array(list(sampler(shards, window=8))) % samples
    counts = np.stack([np.bincount(labels[part], minlength=classes) for part in order.reshape(-1, batch)])
    expected = batch / classes
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < _chi_square_limit(degrees=len(counts) * (classes - 1))
    # A set that lies sorted by class does not pass: the test can fail.
    unmixed = np.stack([np.bincount(np.sort(labels)[part], minlength=classes) for part in order.reshape(-1, batch)])
    assert float(((unmixed - expected) ** 2 / expected).sum()) > _chi_square_limit(len(counts) * (classes - 1))


def _chi_square_limit(degrees: int) -> float:
    """The value that 1 % of fair draws exceed: Wilson and Hilferty 1931, good to 0.1 % from some 30 degrees on."""
    z = NormalDist().inv_cdf(0.99)
    return float(degrees * (1 - 2 / (9 * degrees) + z * (2 / (9 * degrees)) ** 0.5) ** 3)


def test_what_follows_is_the_next_epoch() -> None:
    one = ResumableSampler(range(20), 2, 1, seed=3)
    one.set_epoch(4)
    following = one.following().tolist()
    assert one.epoch == 4
    one.set_epoch(5)
    assert following == list(one)


def test_orders_are_pinned() -> None:
    """A run that goes on after an upgrade must meet the order that it began with."""
    drawn = list(sampler(np.repeat(np.arange(4), 3), 2))
    assert Counter(drawn) == Counter(range(12))
    assert drawn == [7, 8, 5, 6, 4, 9, 10, 3, 11, 0, 2, 1]
