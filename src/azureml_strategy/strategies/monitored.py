"""What schedulers follow: each rank has logged a value of its own, and all ranks must step by the same."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from azureml_strategy.control.gather import gather
from azureml_strategy.lightning_internals import follow_together


def average_monitored_values(trainer: Trainer) -> None:
    """Have all ranks' ReduceLROnPlateau follow the mean over the ranks.

    Lightning gives each the value that its own rank has logged. Without `sync_dist=True` the learning rates come apart,
    and with them the models. A value that all ranks have alike stays what it is, to the bit.

    Args:
        trainer: about to start; other functions than fit have no schedulers.
    """
    if trainer.state.fn == TrainerFn.FITTING and trainer.world_size > 1:
        follow_together(trainer, _mean_of_ranks)


def _mean_of_ranks(value: Any) -> Any:
    """A collective. Ranks that have logged nothing count for nothing; Lightning asks for the value on all of them."""
    logged = [each for each in gather(None if value is None else float(value)) if each is not None]
    if value is None and not logged:
        return None
    if len(set(logged)) == 1 and value is not None:
        return value
    mean = sum(logged) / len(logged)
    return value.new_tensor(mean) if isinstance(value, Tensor) else mean
