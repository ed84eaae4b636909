from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from azureml_strategy.tracking import DataHeadSpace
from azureml_strategy.tracking.timing.loader_headroom import LoaderHeadroom


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, samples: int, wait_s: float = 0.0) -> None:
        self.samples, self.wait_s, self.read = samples, wait_s, 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self.wait_s)
        self.read += 1
        return {"row": torch.full((4,), float(index))}


class Endless(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        for index in range(10**9):
            yield {"row": torch.full((4,), float(index))}


class Taking(LightningModule):
    """Takes what it needs out of its batches, and notes what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.got: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        row = batch.pop("row")
        self.got.append(float(row[0, 0]))
        return self.layer(row).square().mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


def fit(callback: DataHeadSpace, data: Any, *validation: Any, **options: Any) -> tuple[Taking, Trainer]:
    model = Taking()
    trainer = Trainer(
        **{"max_epochs": 100, "logger": False, "enable_checkpointing": False} | options,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, *options.get("callbacks", [])],
    )
    trainer.fit(model, DataLoader(data, batch_size=2), *validation)
    return model, trainer


def test_steps_from_memory_do_not_wait_for_the_loader(tmp_path: Path) -> None:
    callback = DataHeadSpace(steps=5, batches=3)
    model, trainer = fit(callback, Rows(1000, wait_s=0.02), logger=CSVLogger(tmp_path), log_every_n_steps=1)
    turn = 5 + 3  # with those that do not count
    assert trainer.global_step == 6 * turn
    assert model.got[:turn] == [2.0 * index for index in range(turn)]
    kept = model.got[turn - 3 : turn]
    assert sorted(set(model.got[turn : 2 * turn])) == kept
    assert model.got[2 * turn : 3 * turn] == [2.0 * index for index in range(turn, 2 * turn)]
    found = callback.found
    assert found is not None
    assert found.loader_s >= 0.04  # two samples
    assert found.memory_s < found.loader_s
    trainer.logger.save()
    assert "summary/data_head_space" in Path(trainer.logger.experiment.metrics_file_path).read_text()


@pytest.mark.parametrize("data", [Rows(10), Endless()])
def test_epochs_may_be_short_or_have_no_end(data: Dataset[Any]) -> None:
    callback = DataHeadSpace(steps=4, batches=2)
    _, trainer = fit(callback, data, DataLoader(Rows(2)), accumulate_grad_batches=2, limit_val_batches=1)
    assert callback.found is not None
    assert callback.found.loader_s > 0
    assert trainer.global_step == 6 * (4 + 3)


def test_a_training_that_ends_too_soon_says_how_many_steps_it_takes() -> None:
    callback = DataHeadSpace(steps=10)
    with pytest.warns(UserWarning, match="1 of its 6 turns .* for 78 steps or more"):
        fit(callback, Rows(1000), max_steps=20)
    assert callback.found is None


def test_no_checkpoints_of_it() -> None:
    with pytest.raises(MisconfigurationException, match="ModelCheckpoint would write checkpoints"):
        fit(DataHeadSpace(), Rows(10), enable_checkpointing=True)


def test_without_steps_it_does_nothing() -> None:
    model, _ = fit(DataHeadSpace(steps=None), Rows(10), max_epochs=1, enable_checkpointing=True)
    assert model.got == [0, 2, 4, 6, 8]


def test_a_step_that_reads_by_itself_is_refused() -> None:
    class Reads(Taking):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            batch, *_ = next(dataloader_iter)
            return self.layer(batch["row"]).square().mean()

    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[DataHeadSpace()], max_steps=2
    )
    with pytest.raises(MisconfigurationException, match="reads its batches itself"):
        trainer.fit(Reads(), DataLoader(Rows(10)))


@pytest.mark.parametrize("options", [{"steps": 0}, {"batches": 0}])
def test_nothing_to_measure(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="measures nothing"):
        DataHeadSpace(**options)


def test_the_sentence() -> None:
    assert (
        LoaderHeadroom(0.2, 0.15)
        .text()
        .startswith(
            "Head-space of the data: 25% of a step (0.2 s a step with its loader, 0.15 s with batches from memory). A "
            "perfect loader would make this training 1.33 times as fast"
        )
    )
    assert "none, the loader keeps up" in LoaderHeadroom(0.2, 0.199).text()
    assert "none, the loader keeps up" in LoaderHeadroom(0.2, 0.21).text()
