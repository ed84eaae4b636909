from __future__ import annotations

from fractions import Fraction

import pytest

from azureml_strategy.checkpoint.global_batch import GlobalBatch


def test_samples_of_a_step_and_of_a_round() -> None:
    batch = GlobalBatch(8, 4, 2)
    assert (batch.size, batch.round_size) == (64, 32)
    assert str(batch) == "batch size 8 x 4 data-parallel rank(s) x accumulation 2"


def test_without_a_batch_size_it_counts_batches() -> None:
    known, unknown = GlobalBatch(8, 4, 2), GlobalBatch(None, 2, 4)
    assert known.as_known_by(unknown).size == unknown.as_known_by(known).size == 8
    assert known.as_known_by(GlobalBatch(1, 1, 1)) == known
    assert str(unknown).startswith("batches of unknown size x 2 ")


@pytest.mark.parametrize(("batches", "steps"), [(None, None), (8, 4), (9, 5)])
def test_steps_of_an_epoch(batches: int | None, steps: int | None) -> None:
    assert GlobalBatch(8, 4, 2, batches).epoch_steps == steps


def test_the_same_samples_in_other_batches() -> None:
    assert GlobalBatch(2, 2, 1).batches_for_one_of(GlobalBatch(2, 1, 1)) == Fraction(1, 2)
    assert GlobalBatch(2, 1, 1).batches_for_one_of(GlobalBatch(3, 2, 1)) == 3
