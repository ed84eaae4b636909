"""Scripts whose learning rates, validations or ends are not those of the first tutorial."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping
from tests.faults.scripts.common import Regressor, Training, training
from torch import Tensor


class OneCycle(Regressor):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class PlateauByEpoch(Regressor):
    """Whatever the loss does: it counts as no progress, so that the rate falls."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class PlateauByStep(Regressor):
    """Follows the loss of all ranks: with those of their own they would soon train models of their own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "mean_loss", "interval": "step"},
        }


class ByEpochAndStep(Regressor):
    """Two parameter groups, a schedule of epochs, in warm-up and decay."""

    def configure_optimizers(self) -> Any:
        *first, last = self.network
        groups = [
            {"params": [each for layer in first for each in layer.parameters()], "lr": 1e-3},
            {"params": last.parameters(), "lr": 1e-2},
        ]
        optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9, nesterov=True)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=1)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
        chained = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], milestones=[1])
        return [optimizer], [{"scheduler": chained, "interval": "epoch"}]


def onecycle() -> Training:
    return training(OneCycle())


def plateau_epoch() -> Training:
    return training(PlateauByEpoch(), max_epochs=4)


def plateau_step() -> Training:
    return training(PlateauByStep())


def epoch_schedule() -> Training:
    return training(ByEpochAndStep(), max_epochs=4)


def mid_epoch_validation() -> Training:
    return training(val_check_interval=4)


def validation_across_epochs() -> Training:
    """Every so many batches, whatever the epoch."""
    return training(val_check_interval=7, check_val_every_n_epoch=None)


def early_stopping() -> Training:
    """Nothing is progress enough: it ends after the third validation."""
    return training(None, EarlyStopping("val_loss", patience=2, min_delta=10.0), max_epochs=8)


def early_stopping_inside() -> Training:
    """The same, in the middle of an epoch."""
    return training(None, EarlyStopping("val_loss", patience=3, min_delta=10.0), max_epochs=8, val_check_interval=6)


def max_steps() -> Training:
    return training(max_steps=38, max_epochs=-1)


def max_steps_at_epoch_end() -> Training:
    return training(max_steps=45, max_epochs=-1)


def no_validation() -> Training:
    made = training()
    made.validate, made.monitor, made.every_n_train_steps = None, None, 3
    return made


def fixed_limits() -> Training:
    """Epochs that are cut short."""
    return training(limit_train_batches=11, limit_val_batches=2, max_epochs=4)
