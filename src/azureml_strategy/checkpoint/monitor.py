"""The metric that ranks checkpoints: whether a training can log it, and what is said where nobody does.

A training is never stopped for it. Without the metric the newest checkpoints stay, and none is the best.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler


def never_validates(trainer: Trainer) -> str:
    """Say why no validation runs before this training ends, as far as its settings tell; empty if one may run.

    Args:
        trainer: about to train: it has its loaders, and has taken no step.
    """
    if trainer.limit_val_batches == 0:
        return "limit_val_batches=0"
    if not trainer.enable_validation:
        return "there is no validation_step, or there are no data for it"
    if trainer.num_val_batches and not any(trainer.num_val_batches):
        return "its loaders are empty"
    first, most = _first_validation(trainer), _most_batches(trainer)
    if first <= most:
        return ""
    return f"the first would come after {first:,.0f} batches, and the training ends after {most:,.0f} at most"


def _first_validation(trainer: Trainer) -> float:
    """The number of batches before the first validation; 0 if it is not known."""
    interval, every, epoch = trainer.val_check_batch, trainer.check_val_every_n_epoch, trainer.num_training_batches
    if interval is None or math.isinf(epoch):  # by the clock, or at the end of data whose length is not known
        return interval if interval is not None and every is None and not math.isinf(interval) else 0
    return interval if every is None else (every - 1) * epoch + min(interval, epoch)


def _most_batches(trainer: Trainer) -> float:
    """The number of batches that this training reads at most: a step takes no more than the accumulated ones."""
    epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
    by_epochs = math.inf if math.isinf(epochs) else epochs * trainer.num_training_batches
    changes = any(isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks)  # type: ignore[attr-defined]
    counts = trainer.max_steps != -1 and trainer.lightning_module.automatic_optimization and not changes
    return min(by_epochs, trainer.max_steps * trainer.accumulate_grad_batches if counts else math.inf)


def say_unranked(monitor: str, why: str) -> str:
    """Say before the first step that no validation will log the metric.

    Args:
        monitor: name of the metric.
        why: there is no validation, from `never_validates`.
    """
    return (
        f"No validation runs in this training: {why}. Unless the training itself logs {monitor!r}, which "
        "JobCheckpoint(monitor=...) asks for, the newest checkpoints stay, and none is kept as the best."
    )


def say_not_logged(monitor: str, metrics: Mapping[str, Any]) -> str:
    """Say at a checkpoint that nobody has logged the metric, and which names there are.

    Args:
        monitor: name of the metric.
        metrics: that were logged, by name.
    """
    near = difflib.get_close_matches(monitor, metrics, n=3) or sorted(metrics)
    there = f"Logged are: {', '.join(near)}." if near else "Nothing is logged."
    return (
        f"JobCheckpoint(monitor={monitor!r}), but nobody has logged that. {there} Training goes on: the newest "
        "checkpoints stay, and none is kept as the best. Give one of these names (in a recipe, "
        f"`checkpoint.monitor=NAME`), call self.log({monitor!r}, value) in the module, or leave `monitor` out."
    )


def say_newest_is_best(monitor: str, newest: str) -> str:
    """Say at the end that no checkpoint was ranked, and where the newest is.

    Args:
        monitor: name of the metric.
        newest: path of the newest checkpoint.
    """
    return (
        f"No checkpoint has a {monitor!r}, so that none is the best of this training. The newest takes its place: "
        f"{newest}"
    )
