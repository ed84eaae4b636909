"""Scripts that measure over a whole epoch, by torchmetrics and by Lightning's own means."""

from __future__ import annotations

from typing import Any

import torch
from tests.faults.scripts.common import (
    CLASSES,
    VALIDATION_ROWS,
    Regressor,
    Training,
    network,
    numbers,
    train_loader,
    train_rows,
    training,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix


class Classifier(Regressor):
    """Metrics as attributes, updated in each step and logged at the epoch's end; none is persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network(outputs=CLASSES)
        self.mean_loss = MeanMetric()
        self.margins = CatMetric()  # its state is a list
        self.scores = MetricCollection(
            {"accuracy": MulticlassAccuracy(CLASSES), "top2": MulticlassAccuracy(CLASSES, top_k=2)}, prefix="train_"
        )
        self.confusion = MulticlassConfusionMatrix(CLASSES)
        self.val_accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.mean_loss.update(loss.detach())
        self.margins.update(logits.detach().max(dim=1).values)
        self.scores.update(logits, y)
        self.confusion.update(logits, y)
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train_mean_loss", self.mean_loss.compute())
        self.log("train_margin", self.margins.compute().sum())
        self.log("train_confused", self.confusion.compute()[0, 1].float())
        self.log_dict(self.scores.compute())
        for metric in (self.mean_loss, self.margins, self.scores, self.confusion):
            metric.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_accuracy(logits, y)
        self.log("val_accuracy", self.val_accuracy)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)


class LogsItsMetrics(Regressor):
    """Lightning computes and resets the metric that is logged, and takes means by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.error(loss.detach())
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss


def _labelled(rows: int, seed: int) -> TensorDataset:
    x, y = numbers(rows, seed)
    return TensorDataset(x, (y.squeeze(1) * 2.5 + 2.5).long().clamp(0, CLASSES - 1))


def metrics() -> Training:
    made = training(Classifier())
    made.train = train_loader(_labelled(train_rows(), 1))
    made.validate = DataLoader(_labelled(VALIDATION_ROWS, 2), batch_size=8)
    return made


def epoch_means() -> Training:
    return training(LogsItsMetrics())


def epoch_means_validated_within() -> Training:
    return training(LogsItsMetrics(), val_check_interval=4)


class ListsLosses(Regressor):
    """A plain list, as before Lightning 2: nobody can save what a script keeps by itself, unless it does."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_loss", torch.stack(self.losses).mean())
        self.losses.clear()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["losses"] = [float(loss) for loss in self.losses]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.losses = [torch.tensor(loss) for loss in checkpoint["losses"]]


def own_state() -> Training:
    return training(ListsLosses())
