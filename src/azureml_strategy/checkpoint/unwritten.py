"""What loggers have not written yet goes along in the checkpoint: an outage that outlives the process loses nothing."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer

# Of one logger: name, value, step and milliseconds since 1970 of each metric.
Unwritten = list[list[Any]]


@runtime_checkable
class _KeepingLogger(Protocol):
    """A logger that writes later than it is called, as a `JobMLFlowLogger`; this package does not know the tracking."""

    def unwritten(self) -> Unwritten: ...

    def log_again(self, metrics: Unwritten) -> None: ...


def unwritten(trainer: Trainer) -> list[Unwritten]:
    """What each such logger still has in memory: a resumed run would not log it again."""
    return [logger.unwritten() for logger in trainer.loggers if isinstance(logger, _KeepingLogger)]


def log_again(trainer: Trainer, kept: list[Unwritten]) -> None:
    """Give it back to them; what the store has meanwhile, they leave out."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, _KeepingLogger)]
    for logger, metrics in zip(loggers, kept, strict=False):  # whoever added a logger meanwhile has nothing to give it
        logger.log_again(metrics)
