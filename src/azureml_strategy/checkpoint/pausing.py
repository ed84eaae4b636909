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
