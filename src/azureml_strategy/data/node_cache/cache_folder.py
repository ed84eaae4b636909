"""The folder that a node keeps fetched blocks in: sparse files, which blocks they hold, and the bytes they take."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import resource
import shutil
import time
from contextlib import suppress
from functools import _lru_cache_wrapper, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from azureml_strategy.data.node_cache.protocol import BlockTable
from azureml_strategy.data.shard_index import INDEX_NAME, ShardIndex, load_index
from azureml_strategy.data.storage.folder import OpenFile
from azureml_strategy.files import is_private

# Only folders with this file belong to the cache. It holds the layout of the folder, and the size of its blocks.
MARKER = ".azureml-strategy-cache"
_LAYOUT = 1
_PRESENT, _USED = "present", "used"
_PAGE = 4096
# File systems keep the map of a file's pieces with the file: ext4 a page for each 340 of them. The limit covers it.
_SLACK = 1024
# linux/falloc.h
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_MOST_FILES = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


def open_files(folder: Path, flags: int) -> _lru_cache_wrapper[OpenFile]:
    """Return a function that opens a shard of a set in the cache, with flags of open(2), and raises what that raises.

    It keeps files open, but not all: a set may have more shards than a process may open files.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

    @lru_cache(_MOST_FILES if soft == resource.RLIM_INFINITY else max(8, min(_MOST_FILES, soft // 4)))
    def open_shard(shard: int) -> OpenFile:
        return OpenFile(os.open(folder / shard_file(shard), flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))

    return open_shard


class Shared(NamedTuple):
    """Memory that all processes of a node share about a set's blocks.

    Attributes:
        present: uint8 `(blocks,)`, 1 where a block can be read from the cache.
        used: int64 `(blocks,)`, when it was last read, nanoseconds of the monotonic clock.
    """

    present: NDArray[np.uint8]
    used: NDArray[np.int64]


def map_shared(folder: Path, blocks: int) -> Shared:
    """Map the files in a set's folder that all processes share."""
    # As plain arrays: numpy takes several times as long with its class for mapped files.
    return Shared(
        np.asarray(np.memmap(folder / _PRESENT, np.uint8, "r+", shape=(blocks,))),
        np.asarray(np.memmap(folder / _USED, np.int64, "r+", shape=(blocks,))),
    )


def shard_file(number: int) -> str:
    """Return the name of a shard's file in the cache."""
    return f"{number:06}"


class CachedSet:
    """The blocks of one set in the cache, each at its own place in a sparse file. One thread uses it.

    Attributes:
        folder: of the set.
        shared: which blocks are there.
    """

    def __init__(self, folder: Path, index: ShardIndex, table: BlockTable) -> None:
        self.folder, self._table, self._sizes = folder, table, index.sizes
        self.shared = map_shared(folder, len(table))
        self._file = open_files(folder, os.O_RDWR | os.O_CREAT)
        self._taken = {shard: _taken(folder / shard_file(shard)) for shard in range(len(index.shards))}
        # Of all files but the shards, which does not grow.
        self._fixed = _taken_by_all(folder) - sum(self._taken.values())
        self.bytes = self._fixed + sum(self._taken.values())

    def cost(self, block: int) -> int:
        """Return how many bytes a block takes at most, with the pages that it fills in part."""
        start, end = int(self._table.start[block]), int(self._table.end[block])
        return (-(-end // _PAGE) - start // _PAGE) * _PAGE

    def write(self, block: int, content: memoryview) -> None:
        """Write a block, and only then mark it as present, so that nobody reads it too early.

        Raises:
            OSError: the disk is full, or broken.
        """
        shard, start = int(self._table.shard[block]), int(self._table.start[block])
        file = self._file(shard).descriptor
        try:
            while len(content):
                written = os.pwrite(file, content, start)
                content, start = content[written:], start + written
        finally:
            self._count(shard)
        self.shared.present[block] = 1

    def remove(self, block: int) -> None:
        """Mark a block as absent, and free its pages, but for those that it shares with other blocks.

        A reader that has seen the mark just before reads zeros, which do not have the record's checksum.

        Raises:
            OSError: the disk is broken.
        """
        self.shared.present[block] = 0
        shard = int(self._table.shard[block])
        start, end = int(self._table.start[block]), int(self._table.end[block])
        first, last = start // _PAGE, -(-end // _PAGE)
        if self._has_part(block, -1, first):
            first += 1
        if self._has_part(block, 1, last - 1):
            last -= 1
        if last > first:
            punch(self._file(shard).descriptor, first * _PAGE, (last - first) * _PAGE)
            self._count(shard)

    def _has_part(self, block: int, step: int, page: int) -> bool:
        """Whether another block that is present, before or after this one, has a part of a page."""
        table, other = self._table, block + step
        while 0 <= other < len(table) and table.shard[other] == table.shard[block]:
            if table.start[other] // _PAGE > page or (table.end[other] - 1) // _PAGE < page:
                return False
            if self.shared.present[other]:
                return True
            other += step
        return False

    def _count(self, shard: int) -> None:
        taken = os.fstat(self._file(shard).descriptor).st_blocks * 512
        self.bytes += taken - self._taken[shard]
        self._taken[shard] = taken


class CacheFolder:
    """The folder of a node's cache: a folder for each set, with one limit for all. Other folders there are not touched.

    Args:
        folder: made if it is not there.
        limit: bytes that it may take.

    Attributes:
        sets: those in use, by digest.

    Raises:
        OSError: it cannot be used as a cache. The message says why.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit - limit // _SLACK
        self.sets: dict[str, CachedSet] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Other users may write to the folder, such as one below /tmp: what lies there may be a link of theirs.
        # The lock is kept open, and so held until the process ends.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock = os.open(folder / f"{MARKER}.lock", flags, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EBUSY, "another user, or a container, keeps its cache there already") from None
        _refuse_without_holes(folder)
        own = [path.parent for path in folder.glob(f"*/{MARKER}") if is_private(path.parent)]
        self._old = {each: _taken_by_all(each) for each in own}
        self._own = folder.stat().st_blocks * 512

    @property
    def bytes(self) -> int:
        """What it takes now."""
        return self._own + sum(self._old.values()) + sum(each.bytes for each in self.sets.values())

    @property
    def free(self) -> int:
        """Bytes that it may still take. Old sets count as free: they can be removed."""
        return self.limit - self._own - sum(each.bytes for each in self.sets.values())

    def open_set(self, index: ShardIndex, table: BlockTable, digest: str, block_bytes: int) -> CachedSet:
        """Open a set's folder, with what is there of an earlier job, or make it.

        Raises:
            OSError: the disk is full, or broken.
        """
        if digest not in self.sets:
            folder = self.folder / digest
            self._old.pop(folder, None)
            facts = {"layout": _LAYOUT, "block_bytes": block_bytes, "blocks": len(table)}
            if os.path.lexists(folder) and not is_private(folder):
                raise PermissionError(errno.EPERM, f"{folder} is a link, or others may write to it: remove it")
            if not _is_made(folder, digest, facts):
                _make(folder, index, facts)
            os.utime(folder)
            self.sets[digest] = CachedSet(folder, index, table)
            # The clock begins again when the machine starts: times from before would lie in the future for long.
            used, now = self.sets[digest].shared.used, time.monotonic_ns()
            used[used > now] = now
        return self.sets[digest]

    def remove_old(self) -> bool:
        """Remove the set that was not used for longest, of those that nobody uses; False if there is none."""
        if not self._old:
            return False
        folder = min(self._old, key=lambda each: each.stat().st_mtime)
        _remove(folder)
        del self._old[folder]
        return True


def _is_made(folder: Path, digest: str, facts: dict[str, int]) -> bool:
    """Whether a set's folder is complete: after a power cut, the end of any of its files may be lost."""
    blocks = facts["blocks"]
    try:
        made = json.loads((folder / MARKER).read_text()) == facts
        sizes = [(folder / name).stat().st_size for name in (_PRESENT, _USED)]
        return made and sizes == [blocks, 8 * blocks] and load_index(folder / INDEX_NAME).digest == digest
    except (OSError, ValueError, RuntimeError):  # the last is zipfile's, for what a damaged header asks of it
        return False


def _make(folder: Path, index: ShardIndex, facts: dict[str, int]) -> None:
    if (folder / MARKER).exists():
        _remove(folder)
    with suppress(OSError):  # an empty one was left by a process that was killed just before or after it had a marker
        folder.rmdir()
    folder.mkdir(mode=0o700)
    (folder / MARKER).write_text(json.dumps(facts))
    index.save(folder / INDEX_NAME)
    # All bytes are allocated now: a process that writes to a mapped file on a full disk is killed.
    _allocate(folder / _USED, 8 * facts["blocks"])
    _allocate(folder / _PRESENT, facts["blocks"])


def _allocate(path: Path, size: int) -> None:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def _remove(folder: Path) -> None:
    """Remove a set, its marker last: if this is interrupted, the rest is still recognized as part of the cache."""
    (folder / _PRESENT).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.name != MARKER:
            path.unlink()
    shutil.rmtree(folder)


def _taken(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _taken_by_all(folder: Path) -> int:
    return _taken(folder) + sum(_taken(path) for path in folder.iterdir())


def punch(file: int, start: int, length: int) -> None:
    """Free a part of an open file, in bytes. It reads as zeros from then on.

    Raises:
        OSError: the file system cannot, or the disk is broken.
    """
    if _libc.fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, start, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _refuse_without_holes(folder: Path) -> None:
    probe = folder / f"{MARKER}.probe"
    probe.unlink(missing_ok=True)
    try:
        with probe.open("xb") as file:  # a new file: it never writes through a link
            file.write(bytes(2 * _PAGE))
            file.flush()
            punch(file.fileno(), 0, _PAGE)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        raise OSError(
            error.errno, "its file system cannot free a part of a file (fallocate); ext4, xfs and tmpfs can"
        ) from error
    finally:
        probe.unlink(missing_ok=True)
