"""Writes checkpoint files atomically, and prepares what each strategy writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from isal.isal_zlib import crc32
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from azureml_strategy.checkpoint.allowed_types import Names
from azureml_strategy.checkpoint.folder import FileChecksums
from azureml_strategy.checkpoint.manifest import PART, StoredFile, sync_folder
from azureml_strategy.checkpoint.serialization import (
    PlainDataStrategy,
    UnsavableStateError,
    from_plain,
    require_loadable,
    run_objects,
    to_plain,
)
from azureml_strategy.control.gather import Exchange, gather_sound
from azureml_strategy.interfaces import StagesCheckpoint, WriteStaged


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's CheckpointIO, with files that survive a crash of the process or machine, and that a restart can load.

    Stock Lightning collects the file in memory, writes it into the system's temporary folder and copies it from there.
    On a mount this copy is not atomic. This class writes to a temporary name beside the target, synchronizes the file
    with the disk and renames it.

    Args:
        plain: convert what torch's weights-only unpickler refuses to plain form, and refuse to write what a restart
            could not load. Set it to False for a strategy that does not read its files through this class, as it could
            not convert them back.
        strategy: the strategy that reads through this class. A file may name the functions and classes that its run
            holds. Our own strategies restore by themselves what they read.
    """

    plain = True  # default for subclasses of users whose `__init__` does not set it
    strategy: Strategy | None = None

    def __init__(self, plain: bool = True, strategy: Strategy | None = None) -> None:
        self.plain = plain
        self.strategy = strategy

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} writes to mounted folders and takes no storage_options.")
        if self.plain:
            checkpoint = to_plain(checkpoint, run=() if self.strategy is None else run_objects(self.strategy))
        self.write(checkpoint, Path(path))

    def write(self, checkpoint: dict[str, Any], target: Path) -> StoredFile:
        """Write a file atomically, with content that is in plain form already if it should be.

        Returns:
            Size and checksum of the bytes that were written.

        Raises:
            OSError: the disk fails or is full.
            ValueError: a restart could not load the content.
        """
        if self.plain:
            require_loadable(checkpoint)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + PART)
        try:
            with open(part, "wb") as file:
                summed = _ChecksumWriter(file)
                torch.save(checkpoint, summed)  # type: ignore[arg-type] # torch.save needs no more than this
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        except BaseException:
            part.unlink(missing_ok=True)  # the disk may be full
            raise
        sync_folder(target.parent)
        return StoredFile(summed.size, summed.crc32)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        loaded = super().load_checkpoint(path, map_location, weights_only)
        if isinstance(self.strategy, PlainDataStrategy):
            return loaded
        run = () if self.strategy is None else run_objects(self.strategy)
        return from_plain(loaded, Names(run, trusted=weights_only is False))


class _ChecksumWriter:
    """Computes the checksum of a file while it is written, so that the file is not read back for it."""

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
    """Whether a strategy can read back entries in plain form: by its CheckpointIO of single files, or by itself."""
    return type(strategy).load_checkpoint is Strategy.load_checkpoint or isinstance(strategy, PlainDataStrategy)


def make_plain(strategy: Strategy, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Add the strategy's own entries, and convert to plain form what our CheckpointIO will write; a collective.

    Raises:
        UnsavableStateError: on all ranks, if a rank has something that a restart could not restore.
    """
    apart: tuple[str, ...] = ()
    if isinstance(strategy, PlainDataStrategy):
        apart, checkpoint = strategy.written_apart, {**checkpoint, **strategy.own_entries()}
    checkpoint_io = strategy.checkpoint_io
    if not apart and not (isinstance(checkpoint_io, AtomicCheckpointIO) and checkpoint_io.plain):
        return checkpoint
    error = None
    try:
        checkpoint = to_plain(checkpoint, apart, run_objects(strategy))
    except UnsavableStateError as unsavable:
        error = str(unsavable)
    errors = [each for each in gather_sound(error) if each is not None]
    if errors:
        raise UnsavableStateError(errors[0])
    return checkpoint


def stage(strategy: Strategy, checkpoint: dict[str, Any]) -> tuple[Any, WriteStaged] | None:
    """Collect what this rank writes; a collective.

    Returns:
        The content to copy, and a function that writes the copy; None if the strategy can only write at once.
    """
    if isinstance(strategy, StagesCheckpoint):
        return strategy.stage_checkpoint(checkpoint)
    checkpoint_io = strategy.checkpoint_io
    # `make_plain` has added what PlainDataStrategy adds.
    plain = type(strategy).save_checkpoint in (Strategy.save_checkpoint, PlainDataStrategy.save_checkpoint)
    if not plain or not isinstance(checkpoint_io, AtomicCheckpointIO):
        return None
    ours = type(checkpoint_io).save_checkpoint is AtomicCheckpointIO.save_checkpoint
    # A subclass may change the content or write something else, so its own `save_checkpoint` must be called.
    save = checkpoint_io.write if ours else checkpoint_io.save_checkpoint

    def write(content: Any, path: Path, exchange: Exchange) -> FileChecksums | None:
        stored = exchange.on_rank_zero(lambda: save(content, path))
        return None if stored is None else {path.name: stored}

    return checkpoint if strategy.is_global_zero else None, write
