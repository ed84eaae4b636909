"""Writes the tar shards of a packed set one by one. Each is read back before it gets its name."""

from __future__ import annotations

import io
import json
import os
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from azureml_strategy.data.shard_index import ShardIndex
from azureml_strategy.files import read_range

# What two header blocks and their padding add to a sample on average: 512 for each header, 256 of padding for the
# record, and 512 for the label with its padding.
SAMPLE_OVERHEAD = 512 + 256 + 1024
_COPIED = 1 << 20  # bytes of a record that are written at once
_ARRAYS = {"offset": np.int64, "length": np.uint32, "label": np.int32, "checksum": np.uint32}


class PackError(ValueError):
    """A data set cannot be packed, or not as it was asked for. The message says what to type instead."""


class UnreadableError(ValueError):
    """A sample of the source cannot be read. It is left out, and counted."""


class Record(NamedTuple):
    """What a shard holds of a sample."""

    suffix: str  # of its file's name, without a dot: `jpg`, `npy`
    content: bytes
    label: int | None  # the number of its class; None for none


class Records(ABC):
    """The samples of a source, as they are packed. It is pickled into worker processes, so it must be small.

    Attributes:
        kind: as `ShardIndex.kind`.
        noun: what its samples are called in messages.
        shuffled: whether they are shuffled before they are dealt to shards.
        classes: names of the classes.
    """

    kind: str
    noun: str
    shuffled: bool
    classes: tuple[str, ...]

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def record(self, number: int) -> Record:
        """Make the record of a sample.

        Raises:
            UnreadableError: the sample is damaged.
            OSError: the source cannot be read at all.
        """

    @abstractmethod
    def name(self, number: int) -> str:
        """Say which sample this is, for a message: its path below the source."""

    @abstractmethod
    def mean_bytes(self, order: NDArray[np.int64]) -> float:
        """Return the bytes of a record on average. `order` is the samples in the order in which they are packed."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what the index records of them, JSON only."""


@dataclass(frozen=True)
class ShardTask:
    """One shard to write: the samples from `start` to before `stop` in the order in which they are packed."""

    records: Records
    order: Path  # file of the samples' numbers
    start: int
    stop: int
    target: Path  # the tar
    work: Path  # folder for the tar while it is written, and for what the index needs of it

    @property
    def _kept(self) -> Path:
        return self.work / f"{self.target.name}.npz"

    def is_done(self) -> bool:
        """Whether the shard is complete, from this run or an earlier one."""
        return self.target.is_file() and self._kept.is_file() and self.read().size == self.target.stat().st_size

    def read(self) -> PackedShard:
        """Return what the index needs of the shard."""
        with np.load(self._kept) as file:
            header = json.loads(file["header"].tobytes())
            return PackedShard(
                self.target.name, header["size"], header["unreadable"], *(file[each] for each in _ARRAYS)
            )

    def run(self, advance: Callable[[], None]) -> None:
        """Write the shard, all or nothing. `advance` is called after each sample.

        Raises:
            PackError: it does not read back as it was written.
            OSError: the source cannot be read, or the shard not be written.
        """
        # With the number of this process: one that was killed may still be ending.
        scratch = self.work / f"{self.target.name}.{os.getpid()}"
        try:
            with scratch.open("wb+") as file:
                shard = self._write(file, advance)
                file.flush()
                os.fsync(file.fileno())
                _verify(file, shard)
            header = json.dumps({"size": shard.size, "unreadable": shard.unreadable}).encode()
            arrays = {name: getattr(shard, name) for name in _ARRAYS}
            with atomic_write(self._kept) as kept:
                np.savez(kept, header=np.frombuffer(header, np.uint8), **arrays)
            scratch.replace(self.target)
        finally:
            scratch.unlink(missing_ok=True)

    def _write(self, file: BinaryIO, advance: Callable[[], None]) -> PackedShard:
        rows: list[tuple[int, int, int, int]] = []
        unreadable: list[str] = []
        # USTAR: every reader knows it, and a header is one block.
        with tarfile.TarFile(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT, copybufsize=_COPIED) as tar:
            for number in np.load(self.order, mmap_mode="r")[self.start : self.stop].tolist():
                try:
                    suffix, content, label = self.records.record(number)
                except UnreadableError as error:
                    unreadable.append(f"{self.records.name(number)} ({error})")
                else:
                    offset = _add(tar, f"{number:08}.{suffix}", content)
                    if label is not None:
                        _add(tar, f"{number:08}.cls", str(label).encode())
                    rows.append((offset, len(content), label or 0, crc32(content)))
                advance()
        columns = np.array(rows, np.int64).reshape(-1, len(_ARRAYS)).T
        arrays = (column.astype(kind) for column, kind in zip(columns, _ARRAYS.values(), strict=True))
        return PackedShard(self.target.name, file.tell(), unreadable, *arrays)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> int:
    """Add a file, and return where its content begins. Without an owner or a time, equal contents make equal tars."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    start = tar.offset + tarfile.BLOCKSIZE
    tar.addfile(member, io.BytesIO(content))
    tar.members = []  # type: ignore[attr-defined]  # they would all stay in memory
    return start


@dataclass(frozen=True, eq=False)
class PackedShard:
    """What the index needs of a shard; the arrays are as those of `ShardIndex`."""

    name: str
    size: int  # bytes of the tar
    unreadable: list[str]  # samples that were left out, each with the reason
    offset: NDArray[np.int64]
    length: NDArray[np.uint32]
    label: NDArray[np.int32]
    checksum: NDArray[np.uint32]


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets its name only once it is complete and on disk."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    file = scratch.open("wb")
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def join_shards(shards: Sequence[PackedShard], records: Records, facts: dict[str, Any]) -> ShardIndex:
    """Return the index of a set of shards."""
    arrays = {name: np.concatenate([getattr(shard, name) for shard in shards]) for name in _ARRAYS}
    return ShardIndex(
        records.kind,
        tuple(shard.name for shard in shards),
        np.array([shard.size for shard in shards], np.int64),
        np.repeat(np.arange(len(shards), dtype=np.uint32), [len(shard.offset) for shard in shards]),
        **arrays,
        classes=records.classes,
        facts=facts,
    )


def _verify(file: BinaryIO, shard: PackedShard) -> None:
    """Read the records back from the disk, not from memory, and compare their checksums."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    records = (shard.offset.tolist(), shard.length.tolist(), shard.checksum.tolist())
    for offset, length, checksum in zip(*records, strict=True):
        if crc32(read_range(file.fileno(), length, offset)) != checksum:
            raise PackError(
                f"{shard.name} was written, but its bytes {offset} to {offset + length} read back otherwise: the disk "
                "or its controller is damaged. Pack to another disk."
            )
