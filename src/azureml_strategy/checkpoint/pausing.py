"""Tells callbacks that watch a training that it pauses on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from lightning.pytorch import Trainer


@runtime_checkable
class Pausable(Protocol):
    """A callback that would mistake a pause for a fault, such as `HangWatch`."""

    def pause(self) -> None:
        """Training pauses from now on."""

    def resume(self) -> None:
        """Training continues."""


@runtime_checkable
class KnowsWriting(Protocol):
    """A callback that allows for a checkpoint taking longer to write than a step."""

    def writes_checkpoint(self) -> None:
        """Training waits for a checkpoint from now on."""


def waits_for_checkpoint(trainer: Trainer) -> None:
    """Tell every `KnowsWriting` callback that the main thread is about to wait for a checkpoint."""
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(each, KnowsWriting):
            each.writes_checkpoint()


@contextmanager
def paused(trainer: Trainer) -> Iterator[None]:
    """Pause every `Pausable` callback inside the context.

    Args:
        trainer: its main thread waits inside the context.
    """
    watching = [each for each in trainer.callbacks if isinstance(each, Pausable)]  # type: ignore[attr-defined]
    for each in watching:
        each.pause()
    try:
        yield
    finally:
        for each in watching:
            each.resume()
