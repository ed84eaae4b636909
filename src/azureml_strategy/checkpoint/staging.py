"""What a checkpoint consists of under each strategy, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch.strategies import Strategy

from azureml_strategy.checkpoint.exchange import Exchange
from azureml_strategy.checkpoint.plain_data import PlainDataStrategy, UnsavableStateError, to_plain
from azureml_strategy.checkpoint.random_state import gather
from azureml_strategy.checkpoint.storage_folder import Summed
from azureml_strategy.checkpoint.storage_io import AtomicCheckpointIO


class WriteStaged(Protocol):
    """Writes what was staged, or a copy of it; on any thread, by all ranks."""

    def __call__(self, content: Any, path: Path, exchange: Exchange) -> Summed | None:
        """Write this rank's files below a path: in steps that the ranks take together, so that all fail alike.

        Args:
            content: as staged.
            path: of the checkpoint.
            exchange: with the ranks that write as well.

        Returns:
            The files that are on disk and summed already, by name, on all ranks; None where all are to be read back.

        Raises:
            StepError: a step failed on some rank.
        """
        ...


@runtime_checkable
class StagesCheckpoint(Protocol):
    """A strategy that can write later than it is asked to."""

    def stage_checkpoint(self, checkpoint: dict[str, Any]) -> tuple[Any, WriteStaged] | None:
        """Collect what this rank is to write; a collective.

        Args:
            checkpoint: as Lightning gives it to `save_checkpoint`.

        Returns:
            What to copy, and what writes the copy; None where it has to be written at once.
        """
        ...


def make_plain(strategy: Strategy, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as a restart can read it, if it is our part to read it; a collective.

    Args:
        strategy: the Trainer's.
        checkpoint: what this rank has, as Lightning gives it to `save_checkpoint`.

    Raises:
        UnsavableStateError: on all ranks, where one has something that a restart could not be given back.
    """
    apart = strategy.written_apart if isinstance(strategy, PlainDataStrategy) else ()
    checkpoint_io = strategy.checkpoint_io
    if not apart and not (isinstance(checkpoint_io, AtomicCheckpointIO) and checkpoint_io.plain):
        return checkpoint
    error = None
    try:
        checkpoint = to_plain(checkpoint, apart)
    except UnsavableStateError as unsavable:
        error = str(unsavable)
    errors = [each for each in gather(error) if each is not None]
    if errors:
        raise UnsavableStateError(errors[0])
    return checkpoint


def stage(strategy: Strategy, checkpoint: dict[str, Any]) -> tuple[Any, WriteStaged] | None:
    """Collect what this rank is to write; a collective.

    Args:
        strategy: the Trainer's.
        checkpoint: as Lightning gives it to `save_checkpoint`.

    Returns:
        What to copy, and what writes the copy; None where the strategy writes at once only.
    """
    if isinstance(strategy, StagesCheckpoint):
        return strategy.stage_checkpoint(checkpoint)
    checkpoint_io = strategy.checkpoint_io
    plain = type(strategy).save_checkpoint is Strategy.save_checkpoint
    if not plain or not isinstance(checkpoint_io, AtomicCheckpointIO):
        return None
    ours = type(checkpoint_io).save_checkpoint is AtomicCheckpointIO.save_checkpoint
    # a subclass may change what is written, or leave something else in the place
    save = checkpoint_io.write if ours else checkpoint_io.save_checkpoint

    def write(content: Any, path: Path, exchange: Exchange) -> Summed | None:
        stored = exchange.on_rank_zero(lambda: save(content, path))
        return None if stored is None else {path.name: stored}

    return checkpoint if strategy.is_global_zero else None, write
