"""The order of the samples: a function of seed, epoch and place alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.data import ResumableLoader, SequenceSampler, TokenSequences


def order(
    samples: int, replicas: int, rank: int, seed: int = 0, epoch: int = 0, resume_at: tuple[int, int] = (0, 0)
) -> list[int]:
    sampler = SequenceSampler(range(samples), replicas, rank, seed)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    sampler.resume_at = resume_at
    return list(sampler)


def global_batches(samples: int, replicas: int, batch: int, **state: int) -> list[set[int]]:
    """What all replicas read in each step, with a global batch of `batch`."""
    share = batch // replicas
    orders = [order(samples, replicas, rank, **state) for rank in range(replicas)]
    steps = len(orders[0]) // share
    return [{index for own in orders for index in own[step * share : (step + 1) * share]} for step in range(steps)]


@given(st.integers(0, 200), st.integers(0, 2**40), st.integers(0, 5))
def test_global_batches_are_equal_for_any_number_of_replicas(samples: int, seed: int, epoch: int) -> None:
    expected = global_batches(samples, 1, 8, seed=seed, epoch=epoch)
    assert len(expected) == samples // 8
    assert all(len(batch) == 8 for batch in expected)
    assert len(set().union(*expected)) == 8 * len(expected), "no sample twice"
    for replicas in (2, 4):
        assert global_batches(samples, replicas, 8, seed=seed, epoch=epoch) == expected


def test_within_a_global_batch_replicas_take_turns() -> None:
    whole = order(64, 1, 0)
    for rank in range(4):
        assert order(64, 4, rank) == whole[rank::4]


def test_the_order_depends_on_seed_and_epoch() -> None:
    orders = {(seed, epoch): tuple(order(50, 1, 0, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4, "torch's own sampler takes the sum of both"
    assert order(50, 1, 0, 1, 1) == list(orders[1, 1])


@given(st.integers(1, 200), st.integers(1, 4), st.integers(1, 4), st.integers(0, 200))
def test_an_epoch_goes_on_at_any_sample_with_any_number_of_replicas(
    samples: int, before: int, after: int, read: int
) -> None:
    read = min(read, samples) // before * before
    first = [index for place in range(read // before) for index in _turn(samples, before, place)]
    rest = [order(samples, after, rank, epoch=3, resume_at=(3, read)) for rank in range(after)]
    assert len({len(share) for share in rest}) == 1
    joined = first + [index for turn in zip(*rest, strict=True) for index in turn]
    whole = order(samples, 1, 0, epoch=3)
    assert joined == whole[: len(joined)]
    assert samples - len(joined) < after
    assert order(samples, after, 0, epoch=4, resume_at=(3, read)) == order(samples, after, 0, epoch=4)


def _turn(samples: int, replicas: int, place: int) -> list[int]:
    return [order(samples, replicas, rank, epoch=3)[place] for rank in range(replicas)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_says_what_it_gave_and_goes_on_there(tmp_path: Path, workers: int) -> None:
    np.arange(1001, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    sequences = TokenSequences(tmp_path / "tokens.bin", "uint16", 10)

    def loader(replicas: int, batch_size: int) -> ResumableLoader:
        sampler = SequenceSampler(sequences, replicas, 0, seed=5)
        return ResumableLoader(sequences, batch_size=batch_size, sampler=sampler, num_workers=workers)

    whole = [batch[0][:, 0].tolist() for batch in loader(1, 4)]
    assert len(whole) == 25
    first = loader(2, 2)
    batches = iter(first)
    for _ in range(7):
        next(batches)
    assert first.state_dict() == {"epoch": 0, "samples": 7 * 2 * 2}
    second = loader(1, 4)
    second.load_state_dict(first.state_dict())
    assert [batch[0][:, 0].tolist() for batch in second] == whole[7:]
    assert second.state_dict() == {"epoch": 0, "samples": 100}
