"""Reads the records of a packed set: from a folder or mount directly, or through the cache of the node."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from azureml_strategy.data.folders import user_cache
from azureml_strategy.data.node_cache.client import NodeCache
from azureml_strategy.data.node_cache.protocol import CacheSettings
from azureml_strategy.data.shard_index import (
    INDEX_NAME,
    MADE_OF,
    RecordError,
    RecordReader,
    ShardIndex,
    ShardIndexError,
    check_record,
    load_index,
)
from azureml_strategy.data.storage import is_remote, own_fault, storage_error
from azureml_strategy.data.storage.folder import OpenFile
from azureml_strategy.data.tar_index import index_tars, is_indexed
from azureml_strategy.files import is_private, read_range
from azureml_strategy.network.doctor.disks import read_mounts

# The share of a disk's free space that the cache takes unless told otherwise: checkpoints and logs need some, too.
_SHARE = 0.9
_CACHE_FOLDER = "azureml-strategy-cache"
# A disk with at least this share of the room of the roomiest one counts as equally good.
_ALIKE = 0.9
# Files that a process keeps open. A set may have thousands of shards, and a process may open 1,024 files by default.
_MOST_OPEN = 200


class ShardReader(RecordReader, Protocol):
    """Reads the records of a packed set, each verified."""

    @property
    def index(self) -> ShardIndex:
        """Where each record lies."""


class FolderReader(RecordReader):
    """Reads records out of the shards in a folder or a mount. The operating system keeps what it has memory for.

    Args:
        folder: the folder of the set.
        index: of the set; by default what lies in the folder, or is made once of its tar files.

    Raises:
        ShardIndexError: the index is damaged, there are no shards, or they are not those of the index.
    """

    def __init__(self, folder: Path, index: ShardIndex | None = None) -> None:
        self._folder = folder
        self.index = index = _verified_index(folder) if index is None else index
        # It does not refer to the reader, which would keep the files open until the garbage is collected.
        self._file = lru_cache(_MOST_OPEN)(
            lambda shard: OpenFile(os.open(folder / index.shards[shard], os.O_RDONLY | os.O_CLOEXEC))
        )

    def __reduce__(self) -> tuple[type[FolderReader], tuple[Path, ShardIndex]]:
        return FolderReader, (self._folder, self.index)  # open files do not travel

    @override
    def read(self, numbers: Sequence[int]) -> list[bytes | Exception]:
        return [self._read(int(number)) for number in numbers]

    @override
    def close(self) -> None:
        self._file.cache_clear()

    def _read(self, number: int) -> bytes | Exception:
        index = self.index
        try:
            # pread leaves the file's position alone, so that processes which share it after a fork are not disturbed.
            file = self._file(int(index.shard[number]))
            content = read_range(file.descriptor, int(index.length[number]), int(index.offset[number]))
        except OSError as error:
            # Without the number: a full table of open files, say, is no fault of this record.
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            if own_fault(error, self._folder):
                return RecordError(f"{index.name(number)}: {error.strerror or error}")
            return storage_error(str(self._folder / index.shards[int(index.shard[number])]), error)
        return check_record(index, number, content)


def find_index(folder: Path) -> ShardIndex:
    """Return the index of a folder of shards. Tar files that have none are read once, and the index is kept.

    It is kept beside them, or, where that is not allowed, in `azureml_strategy/shards` of the user's cache. It names
    the files that it was made of. If one of them was changed, added or removed since, it is made anew. The index of a
    set that was packed is taken as it is.

    Raises:
        ShardIndexError: the index is damaged, or there are neither an index nor tar files that can be indexed.
    """
    beside = folder / INDEX_NAME
    if beside.is_file() or not any(folder.glob("*.tar")):
        _refuse_what_is_no_set(folder)
        index = load_index(beside)
        if MADE_OF not in index.facts or index.facts[MADE_OF] == _indexed_files(folder):
            return index
    files = _indexed_files(folder)
    # Where the index is kept if not beside the tar files: under another name for other files, sizes or times.
    name = hashlib.sha256(repr((str(folder.absolute()), files)).encode()).hexdigest()[:16]
    kept = user_cache() / "shards" / f"{name}.npz"
    if kept.is_file():
        return load_index(kept)
    index = index_tars(folder)
    index = replace(index, facts={**index.facts, MADE_OF: files})
    try:
        index.save(beside)
    except OSError:  # a mount that is read-only, most often
        kept.parent.mkdir(parents=True, exist_ok=True)
        index.save(kept)
    return index


def _indexed_files(folder: Path) -> list[list[str | int]]:
    """Name, size in bytes and time of the last change in nanoseconds of each file that an index is made of."""
    with os.scandir(folder) as entries:
        names = sorted((entry.name, entry.stat()) for entry in entries if is_indexed(entry.name))
    return [[name, facts.st_size, facts.st_mtime_ns] for name, facts in names]


def _verified_index(folder: Path) -> ShardIndex:
    """Find the index of a folder, and refuse one whose shards do not lie there, by their names and sizes."""
    index = find_index(folder)
    with os.scandir(folder) as entries:
        found = {entry.name: entry.stat().st_size for entry in entries if entry.name.endswith(".tar")}
    expected = dict(zip(index.shards, index.sizes.tolist(), strict=True))
    added = sorted(name for name in found if name not in expected and is_indexed(name))
    for name in (*expected, *added):
        if found.get(name) != expected.get(name):
            actual = f"has {found[name]:,} bytes" if name in found else "is missing"
            indexed = f"has {expected[name]:,} bytes" if name in expected else "is not of the set"
            anew = f"; or rm {shlex.quote(str(folder / INDEX_NAME))}, and the shards are indexed as they are"
            raise ShardIndexError(
                f"{folder}: {name} {actual}, but by {INDEX_NAME} it {indexed}. Copy the folder again from where the "
                f"set was packed{anew if index.kind != 'tokens' else ''}."
            )
    return index


def _refuse_what_is_no_set(folder: Path) -> None:
    if not folder.is_dir():
        raise ShardIndexError(
            f"There is no folder {folder}. Give the folder that azureml-strategy data pack SRC OUT wrote."
        )
    sets = [each.parent for each in sorted(folder.glob(f"*/{INDEX_NAME}"))]
    if sets and not (folder / INDEX_NAME).is_file():
        raise ShardIndexError(
            f"{folder} holds the packed sets {', '.join(each.name for each in sets)}. Name one: {sets[0]}"
        )


def is_packed(root: str) -> bool:
    """Whether this is a packed set, or an address, where only a packed set can be read; not a folder of files."""
    folder = Path(root).expanduser()
    return is_remote(root) or (folder / INDEX_NAME).is_file() or next(folder.glob("*.tar"), None) is not None


def join(root: str | os.PathLike[str], folder: str) -> str:
    """Return the place of a folder below another one, or below an address."""
    place = os.fspath(root)
    return f"{place.rstrip('/')}/{folder}" if is_remote(place) else str(Path(place).expanduser() / folder)


def open_reader(root: str, cache: CacheSettings | None) -> ShardReader:
    """Open a packed set. Without the cache of the node, a folder is read directly, and an address by streaming.

    Raises:
        ShardIndexError: there is no such set, or it is damaged.
        StorageError: the storage cannot be reached, or refuses.
    """
    if cache is None and not is_remote(root):
        return FolderReader(Path(root).expanduser())
    return NodeCache(root, cache or CacheSettings(folder=None, limit=0))


def choose_cache(folder: str | os.PathLike[str] | None, limit: int | str | None) -> CacheSettings | None:
    """Return the settings of a cache as a configuration names it.

    Args:
        folder: a folder; `auto` for this node's local disk with the most free space; None for no cache.
        limit: bytes, as a number or as `500GB`; None for nine tenths of what is free, and of what the cache holds.

    Raises:
        ValueError: the limit is no number of bytes.
    """
    if folder is None:
        return None
    place = _roomiest_disk() / _CACHE_FOLDER if folder == "auto" else Path(folder).expanduser()
    return CacheSettings(folder=place.absolute(), limit=_available(place) if limit is None else parse_bytes(limit))


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes: 1000, `100MB`, `1.5 TB`, `64MiB`.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"([\d_]+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", str(size).strip(), re.IGNORECASE)
    number = 0.0
    if found:
        power = "KMGT".index(found[2].upper()) + 1 if found[2] else 0
        number = float(found[1]) * (1024 if found[3] else 1000) ** power
    if not 1 <= number < 2**63:
        raise ValueError(f"{size!r} is no number of bytes. Write one, as 500GB, 1.5TB or 1000000.")
    return int(number)


def _roomiest_disk() -> Path:
    """Return the writable local disk with the most room for a cache, or the temporary folder.

    What a cache takes there counts as room. Of disks with about the same room, one that has a cache is preferred. So
    all processes of a job choose the same disk, and the next job finds what this one has left.
    """
    places = [Path(mount.target) for mount in read_mounts(Path("/proc")) if mount.is_disk and not mount.read_only]
    # Path.is_dir would fail in a folder of somebody else's.
    places = [each for each in places if each != Path("/") and os.path.isdir(each) and os.access(each, os.W_OK)]
    # A cache folder that belongs to others, or is a link, is not used.
    folders = {each: each / _CACHE_FOLDER for each in (Path(tempfile.gettempdir()), *places)}
    places = [each for each, folder in folders.items() if not os.path.lexists(folder) or is_private(folder)]
    rooms = {place: _available(place / _CACHE_FOLDER) for place in places or [Path(tempfile.gettempdir())]}
    alike = [place for place, room in rooms.items() if room >= _ALIKE * max(rooms.values())]
    return max(alike, key=lambda place: os.access(place / _CACHE_FOLDER, os.W_OK))


def _available(place: Path) -> int:
    existing = next(each for each in (place, *place.absolute().parents) if each.is_dir())
    held = 0
    for folder, _, files in os.walk(place):
        for name in files:
            with suppress(FileNotFoundError):  # the server of another process may remove it now
                held += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return int(_SHARE * (shutil.disk_usage(existing).free + held))
