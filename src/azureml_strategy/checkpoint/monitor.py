"""The metric that ranks checkpoints: whether a training can log it, and what happens if nobody logs it.

If no validation logs a name that the user gave, the training stops after its first checkpoint, while little is lost. A
name that a recipe gave is replaced by `val/loss`. If no validation runs, or the training has ended, the newest
checkpoints stay.
"""

from __future__ import annotations

import math

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.model_helpers import is_overridden

from azureml_strategy.checkpoint.builtin_callbacks import callbacks_of
from azureml_strategy.lightning_internals import epoch_results

# Packages whose callbacks log no metric in `on_train_epoch_end` that ranks checkpoints.
_LIBRARIES = ("lightning", "azureml_strategy")

FALLBACK, FALLBACK_MODE = "val/loss", "min"
"""What ranks checkpoints where nobody logs a shipped recipe's monitor, as most models log it."""


def never_validates(trainer: Trainer) -> str:
    """Say why no validation runs before this training ends, as far as its settings tell; empty if one may run.

    Call it when the loaders exist, before the first step.
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
    if interval is None or math.isinf(epoch):  # by the clock, or at the end of data of unknown length
        return interval if interval is not None and every is None and not math.isinf(interval) else 0
    return interval if every is None else (every - 1) * epoch + min(interval, epoch)


def _most_batches(trainer: Trainer) -> float:
    """The number of batches that this training reads at most, if each step takes all the batches it accumulates."""
    epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
    by_epochs = math.inf if math.isinf(epochs) else epochs * trainer.num_training_batches
    changes = callbacks_of(trainer, GradientAccumulationScheduler)
    counts = trainer.max_steps != -1 and trainer.lightning_module.automatic_optimization and not changes
    return min(by_epochs, trainer.max_steps * trainer.accumulate_grad_batches if counts else math.inf)


def is_absent(trainer: Trainer, monitor: str) -> bool:
    """Whether nobody has logged the metric, nor will at the end of the epoch; after a validation, between two steps."""
    if monitor in trainer.callback_metrics:
        return False
    if trainer.is_last_batch:
        return True
    # With on_step=True as well, the value of the epoch is `NAME_epoch`.
    pending = {f"{each.meta.name}{end}" for each in epoch_results(trainer).values() for end in ("", "_epoch")}
    if monitor in pending or is_overridden("on_train_epoch_end", trainer.lightning_module):
        return False
    # A callback of the user's may log at the end of the epoch.
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    users = [each for each in callbacks if type(each).__module__.partition(".")[0] not in _LIBRARIES]
    return not any(is_overridden("on_train_epoch_end", each, Callback) for each in users)


def say_unranked(monitor: str, why: str) -> str:
    """The warning before the first step that no validation will log the metric, and why, from `never_validates`."""
    return (
        f"No validation runs in this training: {why}. Unless the training itself logs {monitor!r}, which "
        "JobCheckpoint(monitor=...) asks for, the newest checkpoints stay, and none is kept as the best."
    )
