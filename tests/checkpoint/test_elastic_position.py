from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from azureml_strategy.checkpoint.elastic import counts_batches_itself, rescale


def fit_loop(total: int, current: int, last: bool = False) -> dict[str, Any]:
    """A checkpoint's loop after so many batches."""
    counts = [{"ready": each, "started": each, "processed": each, "completed": each} for each in (total, current)]
    return {"epoch_loop.batch_progress": {"total": counts[0], "current": counts[1], "is_last_batch": last}}


def test_more_batches_hold_the_same_samples() -> None:
    loop = fit_loop(total=19, current=4)
    rescale(loop, Fraction(2), epoch_batches=30)
    assert loop == fit_loop(total=38, current=8)


def test_fewer_batches_hold_them() -> None:
    loop = fit_loop(total=48, current=18)
    rescale(loop, Fraction(1, 2), epoch_batches=15)
    assert loop == fit_loop(total=24, current=9)


def test_the_end_of_an_epoch_stays_one() -> None:
    loop = fit_loop(total=27, current=9, last=True)
    rescale(loop, Fraction(1, 4), epoch_batches=2)
    assert loop == fit_loop(total=7, current=2, last=True)


def test_an_epoch_with_less_than_a_step_left_ends() -> None:
    loop = fit_loop(total=26, current=8)
    rescale(loop, Fraction(1, 4), epoch_batches=2)
    assert loop == fit_loop(total=7, current=2, last=True)


def test_an_epoch_of_no_known_length() -> None:
    loop = fit_loop(total=3, current=3)
    rescale(loop, Fraction(3, 2), epoch_batches=None)
    assert loop == fit_loop(total=5, current=5)


@pytest.mark.parametrize(
    ("saved", "alone"),
    [
        ({}, False),
        ({"combined_loader": [{"epoch": 1, "samples": 8}]}, False),
        ({"combined_loader": [{"_num_yielded": 3}]}, True),
    ],
)
def test_loaders_that_count_by_themselves(saved: dict[str, Any], alone: bool) -> None:
    assert counts_batches_itself({"state_dict": saved}) == alone
