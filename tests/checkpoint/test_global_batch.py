from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tests.multiprocess.scripts.noisy import Noisy, Numbers
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from azureml_strategy.checkpoint.global_batch import GlobalBatch, configured_global_batch, running_global_batch


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


QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
ROWS = TensorDataset(torch.zeros(12, 6), torch.zeros(12, 1))


class _Looks(Callback):
    """Asks before the loaders are made, and while they are read."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.configured = configured_global_batch(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.running = running_global_batch(trainer)


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


class _WithLoader(Noisy):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(ROWS, batch_size=3)


class _WithSetup(_WithLoader):
    def setup(self, stage: str) -> None:
        self.ready = True

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.ready
        return super().train_dataloader()


@pytest.mark.parametrize(
    ("module", "data", "configured", "running"),
    [
        (Noisy(), {"datamodule": Numbers()}, 2, GlobalBatch(2, 1, 2, 30)),
        (Noisy(), {"train_dataloaders": DataLoader(ROWS, batch_size=4)}, 4, GlobalBatch(4, 1, 2, 3)),
        (Noisy(), {"train_dataloaders": DataLoader(_Stream(), batch_size=4)}, 4, GlobalBatch(4, 1, 2, None)),
        (_WithLoader(), {}, 3, GlobalBatch(3, 1, 2, 4)),
        (_WithSetup(), {}, None, GlobalBatch(3, 1, 2, 4)),
    ],
)
def test_what_it_is_made_of(module: Noisy, data: dict[str, Any], configured: int | None, running: GlobalBatch) -> None:
    looks = _Looks()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=2,
        max_steps=1,
        callbacks=[looks],
        limit_val_batches=0,
        **QUIET,
    )
    trainer.fit(module, **data)
    assert looks.configured == GlobalBatch(configured, 1, 2)
    assert looks.running == running


def test_looking_at_a_loader_draws_no_random_number() -> None:
    class Draws(_WithLoader):
        def train_dataloader(self) -> DataLoader[Any]:
            self.drawn = torch.rand(1)
            return super().train_dataloader()

    module, looks = Draws(), _Looks()
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=1, callbacks=[looks], limit_val_batches=0, **QUIET)
    torch.manual_seed(0)
    trainer.fit(module)
    torch.manual_seed(0)
    assert module.drawn == torch.rand(1)


def test_loaders_of_several_kinds_say_no_size() -> None:
    looks = _Looks()
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=1, callbacks=[looks], limit_val_batches=0, **QUIET)
    with pytest.raises(KeyError):  # the module cannot read them; they were asked before
        trainer.fit(Noisy(), train_dataloaders={"a": DataLoader(ROWS), "b": DataLoader(ROWS)})
    assert looks.running == GlobalBatch(None, 1, 1, 12)
