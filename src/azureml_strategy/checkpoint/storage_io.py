"""A checkpoint of one file, written so that it is complete or not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from isal.isal_zlib import crc32
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from azureml_strategy.checkpoint.manifest import PART, StoredFile, sync_folder
from azureml_strategy.checkpoint.plain_data import PlainDataStrategy, from_plain, require_loadable, to_plain


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
