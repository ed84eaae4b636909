"""A small training that measures itself in every way there is, ends between two batches, and goes on in a fresh fit.

As a script, each of the ranks of a job runs one attempt.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from tests.multiprocess.scripts.common import parameters, report
from tests.multiprocess.scripts.noisy import Curve, Killed, Noisy, Numbers
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, MulticlassAccuracy
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError, PearsonCorrCoef, R2Score
from torchmetrics.segmentation import MeanIoU
from torchmetrics.wrappers import (
    BootStrapper,
    ClasswiseWrapper,
    LambdaInputTransformer,
    MetricTracker,
    MinMaxMetric,
    MultioutputWrapper,
    MultitaskWrapper,
)

from azureml_strategy.checkpoint.metric_state import metric_settings, metric_state, restore_metric_state
from azureml_strategy.checkpoint.random_state import random_state, set_random_state
from azureml_strategy.control.gather import gather

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}


class Signs(Metric):
    """Counts in attributes that `add_state` did not make, some of which a reset spares."""

    full_state_update = True

    def __init__(self, weight: float = 2.0) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.weight, self.seen, self.last, self.kind = weight, 0, None, None
        self.counts: Counter[str] = Counter()

    def update(self, values: Tensor) -> None:
        self.total += self.weight * values.sum()
        self.seen += len(values)
        self.last, self.kind = values[-1:].clone(), values.dtype
        self.counts.update("+" if value > 0 else "-" for value in values.flatten().tolist())

    def compute(self) -> Tensor:
        last = 0 if self.last is None else self.last.sum()
        return self.total + self.seen + 100 * self.counts["+"] - self.counts["-"] + last


class Measured(Noisy):
    """Noisy, with all kinds of metrics and of logged means."""

    def __init__(self, top: float = 2.0) -> None:
        super().__init__()
        self.square = MeanSquaredError()
        self.losses = MeanMetric()
        self.persistent_losses = MeanMetric()
        self.persistent_losses.persistent(True)
        self.values = CatMetric()
        curves = [BinaryAUROC(), BinaryAveragePrecision()]
        self.curves = MetricCollection(curves, prefix="curves/")
        self.errors = MetricCollection(
            {"mse": MeanSquaredError(), "rmse": MeanSquaredError(squared=False), "mae": MeanAbsoluteError()}
        )
        self.apart = MetricCollection([MeanSquaredError(), MeanAbsoluteError()], compute_groups=False)
        self.extremes = MinMaxMetric(MeanSquaredError())
        self.running = RunningMean(window=5)
        self.boot = BootStrapper(MeanSquaredError(), num_bootstraps=3, raw=True)
        self.classwise = ClasswiseWrapper(MulticlassAccuracy(num_classes=2, average=None))
        self.tracker = MetricTracker(
            MetricCollection({"mse": MeanSquaredError(), "rmse": MeanSquaredError(squared=False)})
        )
        self.composed = MeanSquaredError() + 2 * MeanAbsoluteError()
        self.outputs = MultioutputWrapper(MeanSquaredError(), 2)
        self.tasks = MultitaskWrapper({"one": MeanSquaredError(), "two": MeanAbsoluteError()})
        self.shifted = LambdaInputTransformer(MeanSquaredError(), lambda prediction: prediction + 1)
        self.iou = MeanIoU()
        self.correlation = nn.ModuleDict({"pearson": PearsonCorrCoef(), "r2": R2Score()})
        self.signs = Signs(top)
        self.aside = [MeanMetric(), SumMetric()]
        self.named = {"min": MinMetric()}
        self.best = MaxMetric()
        self.validation = MeanMetric()

    def on_train_start(self) -> None:
        self.best.reset()  # as the templates do, against what the sanity check has left there

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        prediction, target = self.network(batch[0]), batch[1]
        loss = nn.functional.mse_loss(prediction, target)
        self._log_values(loss, batch_idx)
        self._measure(loss.detach(), prediction.detach(), target)
        self.square(prediction, target)
        self.log("square", self.square, on_step=True, on_epoch=True)
        self.errors.update(prediction, target)
        self.log_dict(self.errors, on_step=False, on_epoch=True)
        self.losses.update(loss)
        self.log("losses", self.losses)
        return loss

    def _log_values(self, loss: Tensor, batch_idx: int) -> None:
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        for reduction in ("mean", "min", "max", "sum", min, max, sum):
            name = reduction if isinstance(reduction, str) else f"python {reduction.__name__}"
            self.log(f"by {name}", loss, on_step=False, on_epoch=True, reduce_fx=reduction)
        self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=batch_idx % 3 + 1)
        self.log("double", loss.double() / 3, on_step=False, on_epoch=True)
        self.log("half", loss.half(), on_step=False, on_epoch=True)
        self.log("number", batch_idx / 7, on_step=True, on_epoch=True, add_dataloader_idx=False)
        self.log("joined", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("of rank 0", loss, on_step=False, on_epoch=True, rank_zero_only=True)
        if batch_idx < 3:
            self.log("early", loss, on_step=False, on_epoch=True, sync_dist=True)

    def _measure(self, loss: Tensor, prediction: Tensor, target: Tensor) -> None:
        labels = (target > 0).long()
        both = prediction.repeat(1, 2), target.repeat(1, 2)
        for metric in (self.persistent_losses, self.values, self.running, *self.aside, self.named["min"]):
            metric.update(loss)
        for metric in (self.apart, self.boot, self.composed, self.shifted, self.tracker):
            metric.update(prediction, target)
        self.extremes(prediction, target)
        self.outputs.update(*both)
        self.curves.update(prediction.sigmoid(), labels)
        self.classwise.update((prediction > 0).long(), labels)
        self.tasks.update({"one": prediction, "two": prediction}, {"one": target, "two": target})
        classes = torch.stack([prediction < 0, prediction > 0], 1).long()
        self.iou.update(classes, torch.stack([labels == 0, labels == 1], 1).long())
        for metric in self.correlation.values():
            metric.update(prediction.flatten(), target.flatten())
        self.signs.update(prediction)

    def on_train_epoch_end(self) -> None:
        for name, value in self.computed().items():
            self.log(f"end/{name}", value.float())
        for name in ("values", "curves", "apart", "boot", "classwise", "shifted", "signs", "outputs", "tasks"):
            getattr(self, name).reset()

    def computed(self) -> dict[str, Tensor]:
        """Every metric that `self.log` does not reset, each of its values by name."""
        named = {**self._metrics_by_name(), "best": self.best, "validation": self.validation}
        found: dict[str, Tensor] = {}
        for name, metric in named.items():
            _flatten(name, metric.compute() if metric is not self.tracker else self.tracker.compute_all(), found)
        return found

    def _metrics_by_name(self) -> dict[str, Any]:
        names = "persistent_losses values curves apart extremes running boot classwise tracker composed outputs tasks"
        found = {name: getattr(self, name) for name in [*names.split(), "shifted", "iou", "signs"]}
        return {**found, **self.correlation, "aside.0": self.aside[0], "aside.1": self.aside[1], **self.named}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.validation.update(nn.functional.mse_loss(self.network(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.best.update(-self.validation.compute())
        self.log("val/best", self.best.compute())


def _flatten(name: str, value: Any, found: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        found.update({f"{name}.{index}": each for index, each in enumerate(value.flatten())})
    else:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            _flatten(f"{name}.{key}", each, found)


class Looks(Callback):
    """Writes down what a callback would monitor at the start of each batch."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        loop = trainer.fit_loop.epoch_loop
        for kind in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            seen = {f"{kind}/{name}": float(value) for name, value in getattr(trainer, kind).items()}
            for logger in trainer.loggers:
                logger.log_metrics({**seen, f"{kind}/number": len(seen)}, step=loop.total_batch_idx)


class Keeps(Callback):
    """Ends the fit between two batches or epochs with a checkpoint, and goes on from one.

    Args:
        path: the checkpoint.
        end_at: after how many batches the fit ends; None for never. One that ends an epoch ends it with all its hooks.
        in_hook: go on in the next batch's first hook, not before.
    """

    def __init__(self, path: Path, end_at: int | None = None, in_hook: bool = False) -> None:
        self.path, self.end_at, self.in_hook = path, end_at, in_hook
        self.settings: dict[str, Any] = {}
        self.kept: dict[str, Any] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.settings = metric_settings(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["kept"][trainer.global_rank]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Be called where Lightning has no hook: after all hooks of a step or epoch, and before those of the next."""
        loop, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
        start_epoch, start_batch, end_epoch = loop.on_advance_start, batches.advance, loop.on_advance_end

        def on_advance_start() -> None:
            if not self.in_hook:
                self._restore(trainer)
            start_epoch()

        def advance(fetcher: Any) -> None:
            if self._ends(trainer):
                trainer.save_checkpoint(self.path)
                self._end(trainer)
            start_batch(fetcher)

        def on_advance_end() -> None:
            end_epoch()
            if self._ends(trainer):
                self._end(trainer)

        loop.on_advance_start, loop.on_advance_end = on_advance_start, on_advance_end  # type: ignore[method-assign]
        batches.advance = advance  # type: ignore[method-assign]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._ends(trainer):
            trainer.save_checkpoint(self.path)  # of a later one Lightning does not know that the epoch has ended

    def _ends(self, trainer: Trainer) -> bool:
        return trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.end_at

    def _end(self, trainer: Trainer) -> None:
        kept = gather({"metrics": metric_state(trainer, self.settings), "random": random_state()})
        if trainer.is_global_zero:
            torch.save({**torch.load(self.path, weights_only=True), "kept": kept}, self.path)
        trainer.strategy.barrier()
        raise Killed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._restore(trainer)

    def _restore(self, trainer: Trainer) -> None:
        if self.kept is not None:
            set_random_state(self.kept["random"])
            restore_metric_state(trainer, self.kept["metrics"])
            self.kept = None


def attempt(
    output: Path,
    end_at: int | None = None,
    in_hook: bool = False,
    module: LightningModule | None = None,
    **arguments: Any,
) -> list[float]:
    """Train from the beginning or from where the last attempt ended; the weights at the end."""
    rank = int(os.environ.get("RANK", "0"))
    output.mkdir(exist_ok=True)
    seed_everything(5, verbose=False)
    module = Measured() if module is None else module
    torch.manual_seed(5 + rank)
    checkpoint = output / "between.ckpt"
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        val_check_interval=5,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        logger=Curve(output / f"curve.{rank}.jsonl"),
        enable_checkpointing=False,
        callbacks=[Keeps(checkpoint, end_at, in_hook), Looks()],
        **{"devices": 1, **QUIET, **arguments},
    )
    trainer.fit(module, datamodule=Numbers(), ckpt_path=checkpoint if checkpoint.exists() else None, weights_only=True)
    return parameters(module)


if __name__ == "__main__":
    folder, end_at = Path(sys.argv[1]), int(sys.argv[2])
    try:
        weights = attempt(folder, end_at or None, strategy="azureml_ddp")
    except Killed:
        os._exit(0)  # as if it had been killed: the process group is not taken down
    report(int(os.environ["RANK"]), weights=weights)
