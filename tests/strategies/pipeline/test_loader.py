"""Data loaders whose batches cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from tests.strategies.pipeline.modules import Three
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.strategies.pipeline import PipelineError
from azureml_strategy.strategies.pipeline.loader import check_loader


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
