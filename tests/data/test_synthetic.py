"""Batches that cost nothing to load."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from azureml_strategy.data import SyntheticDataModule


class _Record(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.places: list[int] = []
        self.validated = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        self.places.append(images.data_ptr())
        self.images, self.labels = images, labels
        return self.weight * 1.0

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validated += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(module: SyntheticDataModule) -> _Record:
    record = _Record()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    Trainer(accelerator="cpu", devices=1, max_epochs=2, num_sanity_val_steps=0, **quiet).fit(record, datamodule=module)
    return record


def test_one_batch_is_used_at_every_step() -> None:
    record = _fit(SyntheticDataModule(batch_size=3, image_size=8, num_classes=5, steps_per_epoch=4, validation_steps=2))
    assert len(record.places) == 8
    assert len(set(record.places)) == 1  # never copied
    assert (record.images.shape, record.images.dtype) == ((3, 3, 8, 8), torch.uint8)
    assert record.labels.max() < 5
    assert record.validated == 4


def test_the_seed_decides() -> None:
    first, same, other = (next(iter(SyntheticDataModule(2, 8, seed=s).train_dataloader()))[0] for s in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert first.float().mean().item() == pytest.approx(127.5, rel=0.1)


@pytest.mark.parametrize("name", ["batch_size", "image_size", "num_classes", "steps_per_epoch", "validation_steps"])
def test_sizes_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0, but it must be 1"):
        SyntheticDataModule(**{name: 0})
