"""Tells callbacks that watch a training that it stands still on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from lightning.pytorch import Trainer


@runtime_checkable
class Pausable(Protocol):
    """A callback that would take a pause for a fault, as `HangWatch`."""

    def pause(self) -> None:
        """The training stands still from now on."""

    def resume(self) -> None:
        """It goes on."""


@runtime_checkable
class KnowsWriting(Protocol):
    """A callback to which the writing of a checkpoint may take longer than a step."""

    def writes_checkpoint(self) -> None:
        """The training waits for one from now on."""


def waits_for_checkpoint(trainer: Trainer) -> None:
    """Tell every such callback of a Trainer, whose main thread is about to wait."""
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(each, KnowsWriting):
            each.writes_checkpoint()


@contextmanager
def paused(trainer: Trainer) -> Iterator[None]:
    """Have every such callback of a Trainer pause.

    Args:
        trainer: whose main thread waits inside.
    """
    watching = [each for each in trainer.callbacks if isinstance(each, Pausable)]  # type: ignore[attr-defined]
    for each in watching:
        each.pause()
    try:
        yield
    finally:
        for each in watching:
            each.resume()
