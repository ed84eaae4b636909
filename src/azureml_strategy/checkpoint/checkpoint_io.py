"""One file of a checkpoint: complete on disk or not there; and what each strategy writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import torch
from isal.isal_zlib import crc32
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from azureml_strategy.checkpoint.folder import Summed
from azureml_strategy.checkpoint.manifest import PART, StoredFile, sync_folder
from azureml_strategy.checkpoint.plain_data import (
    PlainDataStrategy,
    UnsavableStateError,
    from_plain,
    require_loadable,
    to_plain,
)
from azureml_strategy.control.gather import Exchange, gather


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's own, but what it writes survives the end of the process and of the machine, and can be read again.

    Stock Lightning collects the file in memory, writes it into the system's temporary folder and copies it from there,
    which on a mount is no atomic step. Here it goes straight into a temporary name beside its place, is synchronized
    with the disk, and renamed.

    Args:
        plain: keep what torch's weights-only unpickler refuses in plain form, and refuse to write what a restart
            could not load. False where the strategy reads its files past this class, and would not find it again.
    """

    plain = True  # for classes of others that have an `__init__` of their own

    def __init__(self, plain: bool = True) -> None:
        self.plain = plain

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} writes to mounted folders and takes no storage_options.")
        if self.plain:
            checkpoint = to_plain(checkpoint)
        self.write(checkpoint, Path(path))

    def write(self, checkpoint: dict[str, Any], target: Path) -> StoredFile:
        """Write a file that is complete or not there.

        Args:
            checkpoint: already in plain form, if it is to be.
            target: its place.

        Returns:
            Its size and checksum, of what was given to the disk.

        Raises:
            OSError: the disk fails, or is full.
            ValueError: a restart could not load it.
        """
        if self.plain:
            require_loadable(checkpoint)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + PART)
        try:
            with open(part, "wb") as file:
                summed = _SummedFile(file)
                torch.save(checkpoint, summed)  # type: ignore[arg-type] # which asks for no more than this
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        except BaseException:
            part.unlink(missing_ok=True)  # a full disk must not stay full
            raise
        sync_folder(target.parent)
        return StoredFile(summed.size, summed.crc32)

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable[..., Any] | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        return from_plain(super().load_checkpoint(path, map_location, weights_only))


class _SummedFile:
    """A file whose checksum is known when it is written, so that nobody has to read it for that."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = self.crc32 = 0

    def write(self, data: bytes) -> int:
        self.size += len(data)
        self.crc32 = crc32(data, self.crc32)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def reads_through_io(strategy: Strategy) -> bool:
    """Whether a strategy has its CheckpointIO read single files, or puts back itself what was moved in them."""
    return type(strategy).load_checkpoint is Strategy.load_checkpoint or isinstance(strategy, PlainDataStrategy)


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
