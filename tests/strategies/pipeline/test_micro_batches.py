"""Batches in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.strategies.pipeline import PipelineError
from azureml_strategy.strategies.pipeline.micro_batches import batch_size, check_divides, cut, fingerprint


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_pieces_make_up_the_batch(samples: int, size: int) -> None:
    batch = {"rows": torch.arange(samples), "pair": (torch.arange(2 * samples).view(samples, 2),)}
    pieces = cut(batch, size)
    assert sum(count for _, count in pieces) == batch_size(batch) == samples
    assert all(count == size for _, count in pieces[:-1])
    assert torch.equal(torch.cat([piece["rows"] for piece, _ in pieces]), batch["rows"])
    assert torch.equal(torch.cat([piece["pair"][0] for piece, _ in pieces]), batch["pair"][0])


@given(st.integers(0, 100), st.integers(1, 20))
def test_the_sizes_proposed_divide(samples: int, micro_batches: int) -> None:
    if samples and samples % micro_batches == 0:
        check_divides(samples, micro_batches, "A batch has")
        return
    with pytest.raises(PipelineError) as error:
        check_divides(samples, micro_batches, "A batch has")
    proposed = str(error.value).split("batch size of ")[1].split(" samples")[0]
    for size in map(int, proposed.split(" or ")):
        check_divides(size, micro_batches, "")


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.zeros(4), torch.zeros(3)), "[3, 4] samples"),
        ((torch.zeros(4), "label"), "type str"),
        ((torch.zeros(4), torch.tensor(1)), "type Tensor"),
        ((), "[] samples"),
    ],
)
def test_batches_without_samples_to_cut(batch: Any, words: str) -> None:
    with pytest.raises(PipelineError) as error:
        batch_size(batch)
    assert words in str(error.value)


def test_a_fingerprint_tells_values_shapes_and_types() -> None:
    rows = torch.arange(6)
    others = [rows + 1, rows.view(2, 3), rows.int(), (rows[:3], rows[3:])]
    assert len({fingerprint(each) for each in (rows, *others)}) == 5
    assert fingerprint(rows.clone()) == fingerprint(rows)
    assert fingerprint(torch.ones(2, 2, dtype=torch.bfloat16).t()) == fingerprint(
        torch.ones(2, 2, dtype=torch.bfloat16)
    )
