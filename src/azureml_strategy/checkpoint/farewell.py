"""What is saved and written down when all ranks have stopped."""

from __future__ import annotations

import logging
from typing import Protocol, runtime_checkable

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from azureml_strategy.checkpoint.storage import JobCheckpoint
from azureml_strategy.cluster.job import read_job

log = logging.getLogger(__name__)

# Of the 30 seconds that Azure gives a low-priority node; a server that does not answer must not use them up.
_FLUSH_SECONDS = 8.0


@runtime_checkable
class _RunLogger(Protocol):
    """What a `JobMLFlowLogger` can; this package does not know the tracking."""

    def log_tags(self, tags: dict[str, str]) -> None: ...

    def flush(self, timeout_s: float) -> bool: ...


def save_and_record(trainer: Trainer, reason: str) -> None:
    """Save on all ranks together, and write the reason into the run and on the console.

    A `JobCheckpoint` saves; so does every other checkpoint callback that saves on an exception.

    Args:
        trainer: on all ranks between the same two steps.
        reason: why, the same on all ranks.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, JobCheckpoint):
            callback.save_now(trainer, reason)
        else:
            callback.on_exception(trainer, trainer.lightning_module, SIGTERMException(reason))
    _record(trainer, f"{reason}, after step {trainer.global_step}")


def record_going_on(trainer: Trainer, reason: str) -> None:
    """Write down that nothing came of it.

    Args:
        trainer: about to train on.
        reason: why it had stopped.
    """
    _record(trainer, f"{reason}, after step {trainer.global_step}; it did not come, and training went on")


def _record(trainer: Trainer, text: str) -> None:
    """One tag for each attempt of the job: `stopped.attempt_0`."""
    if trainer.is_global_zero:
        log.warning("All ranks have stopped: %s", text)
    job = read_job()
    for logger in trainer.loggers:
        if isinstance(logger, _RunLogger):
            logger.log_tags({f"stopped.attempt_{job.attempt if job else 0}": text})
            logger.flush(_FLUSH_SECONDS)
