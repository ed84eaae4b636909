"""How the clients and the server of a node's cache find each other and talk, and the blocks that they talk about: runs
of whole records that are fetched, kept and evicted together.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from azureml_strategy.data.shard_index import ShardIndex, ShardIndexError
from azureml_strategy.data.storage import StorageError
from azureml_strategy.files import OutsideError, private_folder

# Two blocks with at most so many bytes between them are read by one request: to read these bytes too costs less than a
# second request. It covers what a tar has between two records: headers, padding, and the file of a label.
GAP = 8 << 10
# The longest range that a request asks for. Azurite and Azure serve 4 MiB at several times the rate of 100 kB.
RANGE = 4 << 20

# A record of this many bytes or more is a block of its own. A block takes nine bytes of shared memory: one tells
# whether it is present, and eight tell when it was last used.
BLOCK_BYTES = 64 << 10
# sun_path of sockaddr_un has 108 bytes, unix(7).
_LONGEST_SOCKET = 107
# A header has one number for each record, and an error message for each record that cannot be read.
LONGEST_HEADER = 16 << 20
# A payload is the records of a request, 64 MiB and one more; or eight bytes for each sample of two passes.
LONGEST_PAYLOAD = 8 << 30
# Memory is allocated for at most so many bytes before they arrive. Requests for records ask for so much at a time.
_AT_ONCE = 64 << 20
# While it works on a request, the server says so this often.
WORKING_SECONDS = 20.0
# Connections that may wait for a server at once: the workers of all ranks begin together.
QUEUE = 1024
# Processes of a node that may use one server at once; each has two counters in shared memory.
SLOTS = 1 << 14


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Where the blocks of a set lie.

    Attributes:
        block_of: int32 `(samples,)`, the block of each sample.
        first: int64 `(blocks + 1,)`, the first sample of each block, and the number of samples.
        shard: int32 `(blocks,)`, the number of the shard that holds a block.
        start: int64 `(blocks,)`, where a block begins in its shard, bytes.
        end: int64 `(blocks,)`, where it ends.
    """

    block_of: NDArray[np.int32]
    first: NDArray[np.int64]
    shard: NDArray[np.int32]
    start: NDArray[np.int64]
    end: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.shard)

    def samples(self, block: int) -> range:
        """Return the samples of a block."""
        return range(int(self.first[block]), int(self.first[block + 1]))

    def runs(self, blocks: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Join neighbouring blocks into ranges, each for one request, and yield the first and last block of each.

        A range has no other blocks than those given, which are in rising order, none twice.
        """
        apart = (
            (np.diff(blocks) != 1)
            | (self.shard[blocks[1:]] != self.shard[blocks[:-1]])
            | (self.start[blocks[1:]] - self.end[blocks[:-1]] > GAP)
        )
        for run in np.split(blocks, np.flatnonzero(apart) + 1):
            first, last = int(run[0]), int(run[-1])
            for before, block in pairwise(run.tolist()):
                if self.end[block] - self.start[first] > RANGE:
                    yield first, before
                    first = block
            yield first, last


def make_blocks(index: ShardIndex, block_bytes: int) -> BlockTable:
    """Cut a set into blocks. A block is a run of records of one shard, and ends as soon as it has `block_bytes`.

    These count from the beginning of its first record to the end of its last one.

    Raises:
        ShardIndexError: records overlap, or are not in the order of their places.
    """
    before = np.concatenate([[0], np.cumsum(index.sizes)])[index.shard]
    begin, end = before + index.offset, before + index.offset + index.length
    if bool((begin[1:] < end[:-1]).any()):
        raise ShardIndexError("The index has records that overlap, or that are not in the order of their places.")
    # For each sample, the last record of a block that would begin there: at the latest the last one of its shard.
    last = np.searchsorted(end, begin + block_bytes, "left")
    last_of_shard = np.searchsorted(index.shard, np.arange(len(index.shards)), "right") - 1
    following = (np.minimum(last, last_of_shard[index.shard]) + 1).tolist()
    first, sample, samples = [], 0, len(index)
    while sample < samples:
        first.append(sample)
        sample = following[sample]
    starts = np.array([*first, samples], np.int64)
    counts, ends = np.diff(starts), starts[1:] - 1
    return BlockTable(
        np.repeat(np.arange(len(first), dtype=np.int32), counts),
        starts,
        index.shard[starts[:-1]].astype(np.int32),
        index.offset[starts[:-1]],
        index.offset[ends] + index.length[ends],
    )


class NodeCacheError(StorageError):
    """The node's cache server cannot be started, or does not answer. The message has the end of its log."""


@dataclass(frozen=True)
class CacheSettings:
    """Where a node keeps what it has fetched.

    Args:
        folder: on a local disk; None keeps nothing, and each record is fetched whenever it is read.
        limit: bytes that the cache may take there.
        block_bytes: records are fetched and evicted in runs of so many bytes; a larger record is a run of its own.
    """

    folder: Path | None = None
    limit: int = 0
    block_bytes: int = BLOCK_BYTES


class Frame(NamedTuple):
    """A message: a line of JSON, and bytes."""

    header: dict[str, Any]
    payload: bytes | bytearray


class ServerPaths(NamedTuple):
    """The files by which processes of one user on one machine find the server of one cache folder."""

    socket: Path
    lock: Path
    log: Path
    slots: Path


def server_paths(folder: Path | None) -> ServerPaths:
    """Return the files of the server of a cache folder; without a folder, of this job's server.

    Raises:
        NodeCacheError: their folder belongs to somebody else, or its path is too long for a socket.
    """
    # Two jobs without a cache share nothing, and may have different rights.
    what = f"folder {folder.resolve()}" if folder else f"job {os.environ.get('AZUREML_RUN_ID', '')}"
    base = _private_folder() / hashlib.sha256(what.encode()).hexdigest()[:12]
    found = ServerPaths(*(base.with_suffix(suffix) for suffix in (".sock", ".lock", ".log", ".slots")))
    if len(os.fsencode(found.socket)) > _LONGEST_SOCKET:
        raise NodeCacheError(
            f"{found.socket} is too long for a Unix socket (107 bytes). Set TMPDIR to a shorter path, such as /tmp."
        )
    return found


def _private_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"azureml-strategy-{os.getuid()}"
    try:
        private_folder(folder)
    except (OutsideError, FileExistsError) as error:
        raise NodeCacheError(
            f"{folder} is not a folder that belongs to this user alone, so the cache server cannot be met there. "
            "Remove it, or set TMPDIR to another folder."
        ) from error
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)  # whoever reaches the socket can send requests to the server
    return folder


def encode(header: dict[str, Any], payload: bytes | memoryview = b"") -> bytes:
    """Return the first line of a message, a header of JSON with the length of the payload, which is sent after it."""
    return json.dumps({**header, "bytes": memoryview(payload).nbytes}).encode() + b"\n"


async def receive(reader: asyncio.StreamReader) -> Frame | None:
    """Read a message; None where the other side has ended.

    Raises:
        ConnectionError: it is none.
    """
    try:
        line = await reader.readline()
    except ValueError as error:
        raise ConnectionError(f"a header of more than {LONGEST_HEADER:,} bytes") from error
    if not line.endswith(b"\n"):
        return None
    header, size = _header(line)
    return Frame(header, await reader.readexactly(size))


def receive_from(file: IO[bytes]) -> Frame:
    """Read a message from a connection.

    Raises:
        EOFError: the other side has ended.
        ConnectionError: it is no message.
    """
    line = file.readline(LONGEST_HEADER)
    if not line.endswith(b"\n"):
        raise EOFError("the connection ended")
    header, size = _header(line)
    payload, done = bytearray(min(size, _AT_ONCE)), 0
    while done < size:
        if done == len(payload):  # it grows with what comes
            payload += bytes(min(size - done, _AT_ONCE))
        with memoryview(payload)[done:] as view:
            count = file.readinto(view)  # type: ignore[attr-defined]  # BufferedReader has it
        if not count:
            raise EOFError("the connection ended in the middle of a message")
        done += count
    return Frame(header, payload)


def _header(line: bytes) -> tuple[dict[str, Any], int]:
    """Return the header in a line, and the number of bytes that follow it."""
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConnectionError("a header that is no JSON") from error
    size = header.get("bytes") if isinstance(header, dict) else None
    if type(size) is not int or not 0 <= size <= LONGEST_PAYLOAD:
        raise ConnectionError(f"a header that announces {size!r:.100} bytes")
    return header, size


def numbers_of(payload: bytes | bytearray) -> NDArray[np.int64]:
    """Return the numbers that a payload holds."""
    return np.frombuffer(payload, np.int64)


def map_counters(path: Path) -> NDArray[np.int64]:
    """Map the counters of all clients, int64 `(SLOTS, 2)`: samples of the pass that were handed out, samples read."""
    return np.asarray(np.memmap(path, np.int64, "r+", shape=(SLOTS, 2)))
