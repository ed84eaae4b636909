from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from tests.strategies.pipeline.modules import Three
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.strategies.pipeline import PipelineError
from azureml_strategy.strategies.pipeline.micro_batches import batch_size, check_divides, check_loader, cut, fingerprint


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


class Checking(Three):
    """A module that has its loader checked when training is about to start, as the strategy does."""

    def on_fit_start(self) -> None:
        check_loader(self.trainer, micro_batches=4)
        raise KeyboardInterrupt


def check(samples: int, trainer: dict[str, Any] | None = None, **arguments: Any) -> None:
    data = TensorDataset(torch.zeros(samples, 4), torch.zeros(samples, 4))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with pytest.raises(SystemExit):  # Lightning's answer to the interrupt
        Trainer(accelerator="cpu", devices=1, **quiet, **(trainer or {})).fit(Checking(), DataLoader(data, **arguments))


def test_batches_that_can_be_cut() -> None:
    check(48, batch_size=16)
    check(40, batch_size=16)  # the last one has 8
    check(41, batch_size=16, drop_last=True)
    check(41, {"limit_train_batches": 2}, batch_size=16)


def test_a_limit_that_reaches_the_last_batch() -> None:
    with pytest.raises(PipelineError, match="epoch of 41 samples has 9"):
        check(41, {"limit_train_batches": 3}, batch_size=16)


@pytest.mark.parametrize(
    ("samples", "batch_size", "words"),
    [(48, 6, "batch_size=6.*6 samples.*micro_batches=4.*4 or 8"), (41, 16, "epoch of 41 samples has 9.*drop_last")],
)
def test_batches_that_cannot(samples: int, batch_size: int, words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        check(samples, batch_size=batch_size)
