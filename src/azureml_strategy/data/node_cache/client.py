"""Reads a set of shards through the cache server of this node. Training processes and their workers use it."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from azureml_strategy.control.process import Member, is_gone, shares_process_table, this_process
from azureml_strategy.data.node_cache.cache_folder import Shared, map_shared, open_files
from azureml_strategy.data.node_cache.protocol import (
    BlockTable,
    CacheSettings,
    Frame,
    NodeCacheError,
    ServerPaths,
    encode,
    make_blocks,
    map_counters,
    receive_from,
    server_paths,
)
from azureml_strategy.data.shard_index import RecordError, ShardIndex, check_record, load_index
from azureml_strategy.data.storage import StorageError, is_remote
from azureml_strategy.data.storage.credentials import storage_variables
from azureml_strategy.files import read_range

# A server that sends nothing for so long has stopped; while it works on a request it says so every 20 seconds.
_PATIENCE_SECONDS = 600.0
# How often a server that was killed is started again for one request.
_STARTS = 3
# A new server reads its libraries first, from a disk that may be slow on a new node.
_START_SECONDS = 120.0
# Bytes of records that one request asks for.
_AT_ONCE = 64 << 20
_LOG_TAIL = 2000
_SIMILAR = 0.05

_all: weakref.WeakSet[NodeCache] = weakref.WeakSet()
_kept_after_fork: list[IO[bytes]] = []
_count = itertools.count()


class NodeCache:
    """The records of a set, from the cache of this node, or from storage by its server.

    It may be pickled, and used after a fork: each process has its own connection. The server runs as long as a process
    that has made such an object.

    Args:
        address: of the folder with the shards, as of `data.storage.open_storage`.
        settings: of the cache. All processes of a node that name the same folder share one server; the first one's
            limit counts.

    Raises:
        NodeCacheError: the server cannot be started, or cannot use the set. The message says why.
    """

    def __init__(self, address: str, settings: CacheSettings) -> None:
        folder = settings.folder.expanduser().resolve() if settings.folder else None
        self._settings = CacheSettings(folder, settings.limit, settings.block_bytes)
        self._address = address if is_remote(address) else str(Path(address).expanduser().resolve())
        self._become_owner()
        self._digest = ""  # copies in workers keep it, so that all of them read one version of the set
        self._begin()
        self._connected()

    def _become_owner(self) -> None:
        """Make this process the owner: the server runs as long as it, and counts what its workers read as its own."""
        self._owner = asdict(this_process(0, 0))
        # The name of this object and of its copies in workers, which no other object has.
        self._reader = f"{os.getpid()}-{next(_count)}"

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._link: _Link | None = None
        self._index: ShardIndex | None = None
        self._table: BlockTable | None = None
        self._longest = 0
        self._expected: tuple[NDArray[np.int64], int] | None = None
        _all.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_settings", "_address", "_owner", "_reader", "_digest")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        owner = Member(**self._owner)
        if not shares_process_table(owner) or is_gone(owner):  # sent from another machine, or read from a file
            self._become_owner()
        self._begin()

    @property
    def index(self) -> ShardIndex:
        """Where each sample lies: the set's own index, or what the server has made of its tar files."""
        if self._index is None:
            with self._lock:
                self._connected()
        assert self._index is not None
        return self._index

    def read(self, numbers: Sequence[int]) -> list[bytes | Exception]:
        """Return records in the order asked for, each with the checksum that it was packed with.

        In place of one that is damaged there is a `RecordError`, and of one that cannot be fetched a `StorageError`.
        """
        with self._lock:
            wanted = np.asarray(numbers, np.int64)
            if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self.index):
                raise IndexError(f"The set has {len(self.index)} samples, numbered from 0.")
            found: dict[int, bytes | Exception] = {}
            for place in self._pieces(wanted):
                self._read(wanted, place, found)
        return [found[place] for place in range(len(wanted))]

    def expect(self, numbers: NDArray[np.int64], following: NDArray[np.int64]) -> None:
        """Announce which samples this rank reads in this pass and in the next one, so that they are fetched before.

        Raises:
            NodeCacheError: the server cannot be reached.
        """
        with self._lock:
            self._expected = (np.concatenate([numbers, following]).astype(np.int64, copy=False), len(numbers))
            self._request({"ask": "expect", "length": len(numbers)}, self._expected[0].tobytes())

    def reached(self, position: int) -> None:
        """Announce how many samples of this pass have been handed out. This takes some microseconds."""
        with self._lock:
            link = self._link
            if link is None or link.pid != os.getpid() or link.has_ended():
                try:  # a new server has to know what to prefetch; if this fails, the next read raises the error
                    link = self._connected()
                except NodeCacheError:
                    return
            link.counters[link.slot, 0] = position

    def statistics(self) -> dict[str, int]:
        """Return what the server has done so far: requests to storage, bytes fetched, blocks stored and evicted.

        Raises:
            NodeCacheError: the server cannot be reached.
        """
        with self._lock:
            return dict(self._request({"ask": "statistics"}).header["statistics"])

    def close(self) -> None:
        """End the connection. The server ends with its last one. The next use connects again."""
        with self._lock:
            link, self._link = self._link, None
            if link is not None:
                link.close()

    def _pieces(self, wanted: NDArray[np.int64]) -> Iterator[list[int]]:
        """Yield the places of records for one request after another, each of some 64 MiB."""
        if len(wanted) * self._longest <= _AT_ONCE:
            yield list(range(len(wanted)))
            return
        size = np.cumsum(self.index.length[wanted].astype(np.int64)) // _AT_ONCE
        for piece in np.split(np.arange(len(wanted)), np.flatnonzero(np.diff(size)) + 1):
            yield piece.tolist()

    def _read(self, wanted: NDArray[np.int64], places: list[int], found: dict[int, bytes | Exception]) -> None:
        try:
            link = self._connected()
            absent, damaged = self._from_cache(link, wanted, places, found)
            while absent or damaged:
                asked = absent + damaged
                frame = self._request({"ask": "read", "damaged": len(damaged)}, wanted[asked].tobytes())
                cached = self._from_answer(wanted, asked, frame, found)
                absent, damaged = [], [*itertools.chain(*self._from_cache(self._connected(), wanted, cached, found))]
            link = self._connected()
            link.counters[link.slot, 1] += len(places)
        except NodeCacheError as error:
            found.update({place: error for place in places if place not in found})

    def _from_cache(
        self, link: _Link, wanted: NDArray[np.int64], places: list[int], found: dict[int, bytes | Exception]
    ) -> tuple[list[int], list[int]]:
        """Read what is in the cache; return the places of the records that are absent, and of the damaged ones."""
        if link.cached is None or self._table is None:
            return places, []
        index, numbers = self.index, wanted[places]
        absent, damaged = [], []
        blocks = self._table.block_of[numbers]
        present = link.cached.present[blocks] != 0
        link.cached.used[blocks[present]] = time.monotonic_ns()
        # Lists: to take numbers out of an array one by one costs a tenth of the time of the read itself.
        columns = (numbers, present, index.shard[numbers], index.length[numbers], index.offset[numbers])
        rows = zip(places, *(column.tolist() for column in columns), strict=True)
        for place, number, there, shard, length, offset in rows:
            if not there:
                absent.append(place)
                continue
            try:
                record = check_record(index, number, read_range(link.file(shard).descriptor, length, offset))
            except OSError:  # a failing disk: the server has other ways
                damaged.append(place)
                continue
            if isinstance(record, RecordError):
                damaged.append(place)
            else:
                found[place] = record
        return absent, damaged

    def _from_answer(
        self, wanted: NDArray[np.int64], asked: list[int], frame: Frame, found: dict[int, bytes | Exception]
    ) -> list[int]:
        """Take the records of an answer; return the places of those that are in the cache now."""
        there, at, payload = [], 0, memoryview(frame.payload)
        for row, (place, size) in enumerate(zip(asked, frame.header["sizes"], strict=True)):
            number = int(wanted[place])
            if size >= 0:
                found[place] = check_record(self.index, number, bytes(payload[at : at + size]))
                at += size
            elif str(row) in frame.header["errors"]:
                found[place] = StorageError(f"{self.index.name(number)}: {frame.header['errors'][str(row)]}")
            else:
                there.append(place)
        return there

    def _request(self, header: dict[str, Any], payload: bytes = b"") -> Frame:
        """Send a request to the server. If it has ended, it is started again.

        Raises:
            NodeCacheError: it cannot answer, or ends again and again.
        """
        for _ in range(_STARTS + 1):
            link = self._connected()
            try:
                return link.request(header, payload)
            except (EOFError, ConnectionError):
                self.close()
        raise NodeCacheError(
            f"The cache server of this node has ended {_STARTS + 1} times while it was asked for `{header['ask']}`. "
            f"{_log_tail(link.paths)}"
        )

    def _connected(self) -> _Link:
        """Return this process's connection; connect if there is none."""
        link = self._link
        if link is not None and link.pid == os.getpid() and not link.has_ended():
            return link
        self.close()
        for _ in range(_STARTS + 1):
            with suppress(EOFError, ConnectionError):
                link = _Link(_connect(self._settings))
                try:
                    self._open(link)
                except BaseException:
                    link.close()
                    raise
                self._link = link
                return link
        raise NodeCacheError(
            f"The cache server of this node has ended {_STARTS + 1} times while it opened {self._address}. "
            f"{_log_tail(server_paths(self._settings.folder))}"
        )

    def _open(self, link: _Link) -> None:
        own = self._owner["pid"] == os.getpid()
        # The server may have been started by another job, whose variables name another account.
        environ = storage_variables(os.environ if is_remote(self._address) else {})
        who = {"owner": self._owner, "own": own, "reader": self._reader}
        asked = {"ask": "open", "address": self._address, "environ": environ, "known": self._digest, **who}
        facts = link.request(asked).header
        if self._digest and facts["digest"] != self._digest:
            raise NodeCacheError(
                f"{self._address} is another set than when this training began: its index has changed. Start again."
            )
        # A limit that is a share of the free space differs a little between processes.
        if own and facts["cached"] and abs(facts["limit"] - self._settings.limit) > _SIMILAR * facts["limit"]:
            warnings.warn(
                f"The cache in {self._settings.folder} is in use already with limit={facts['limit']}, which stays; "
                f"limit={self._settings.limit} is not used. Give all jobs of a node the same, or other folders.",
                RuntimeWarning,
                stacklevel=2,
            )
        if self._index is None:
            self._index, self._digest = load_index(Path(facts["index"])), facts["digest"]
            self._longest = int(self._index.length.max())
        if facts["cached"]:
            self._table = self._table or make_blocks(self._index, facts["block_bytes"])
            link.use(Path(facts["cached"]), len(self._table))
        if self._expected is not None and own:
            link.request({"ask": "expect", "length": self._expected[1]}, self._expected[0].tobytes())


class _Link:
    """A process's connection to the server, and the files that it maps."""

    def __init__(self, connection: tuple[socket.socket, ServerPaths]) -> None:
        self.pid = os.getpid()
        self._socket, self.paths = connection
        self._file: IO[bytes] = self._socket.makefile("rb")
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.slot = 0
        self.cached: Shared | None = None
        self.file: Any = None
        try:
            self.counters = map_counters(self.paths.slots)
        except FileNotFoundError as error:  # the server removes them when it ends, and so it is ending now
            self.close()
            raise ConnectionError("the server ends") from error

    def use(self, folder: Path, blocks: int) -> None:
        """Map the cache, so that records are read from it directly."""
        self.cached, self.file = map_shared(folder, blocks), open_files(folder, os.O_RDONLY)

    def request(self, header: dict[str, Any], payload: bytes = b"") -> Frame:
        """Ask, and wait for the answer.

        Raises:
            EOFError, ConnectionError: the server has ended.
            NodeCacheError: it cannot answer, or stands still.
        """
        try:
            self._socket.sendall(encode(header, payload))
            self._socket.sendall(payload)
            frame = receive_from(self._file)
            while "working" in frame.header:
                frame = receive_from(self._file)
        except TimeoutError as error:
            self.close()
            raise NodeCacheError(
                f"The cache server of this node has said nothing for {_PATIENCE_SECONDS:.0f} seconds: it was stopped, "
                f"or its disk hangs. {_log_tail(self.paths)}"
            ) from error
        except BaseException:  # as by Ctrl-C: a late answer must not be taken for that of the next request
            self.close()
            raise
        for notice in frame.header.get("notices", ()):
            warnings.warn(notice, RuntimeWarning, stacklevel=2)
        if "error" in frame.header:
            raise NodeCacheError(frame.header["error"])
        self.slot = frame.header.get("slot", self.slot)
        return frame

    def has_ended(self) -> bool:
        """Whether the server has closed the connection."""
        # Between two requests, only the end can arrive. After `close`, the descriptor may belong to another file.
        return self._file.closed or bool(self._poll.poll(0))

    def close(self) -> None:
        """End the connection."""
        self._file.close()
        self._socket.close()
        if self.file is not None:
            self.file.cache_clear()

    def close_after_fork(self) -> None:
        """Close a forked child's copy of the connection.

        The buffered file is never closed: a thread of the parent may have held its lock at the fork, which nobody
        releases in the child.
        """
        _kept_after_fork.append(self._file)
        descriptor = self._socket.detach()
        if descriptor >= 0:
            os.close(descriptor)
        if self.file is not None:
            self.file.cache_clear()


def _connect(settings: CacheSettings) -> tuple[socket.socket, ServerPaths]:
    """Connect to the server; start it if there is none."""
    paths = server_paths(settings.folder)
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        try:
            connection = _try_to_connect(paths)
            if connection is None:
                _start_server(settings, paths)
                # Our server answers at once. If another process's was faster, it may not listen yet.
                connection = _try_to_connect(paths)
            if connection is not None:
                return connection, paths
        except BlockingIOError:  # the server's queue is full of others that wait
            pass
        time.sleep(0.05)
    raise NodeCacheError(
        f"The cache server of this node does not answer at {paths.socket} after {_START_SECONDS:.0f} seconds. "
        f"{_log_tail(paths)}"
    )


def _try_to_connect(paths: ServerPaths) -> socket.socket | None:
    """Connect to the server; None if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_PATIENCE_SECONDS)
    try:
        connection.connect(str(paths.socket))
    except OSError as error:
        connection.close()
        if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
            return None
        raise
    return connection


def _start_server(settings: CacheSettings, paths: ServerPaths) -> None:
    """Start a server. If several are started at once, one of them serves, and the others end."""
    options = {**asdict(settings), "folder": str(settings.folder) if settings.folder else None}
    command = [sys.executable, "-m", "azureml_strategy.data.node_cache", json.dumps(options)]
    with (
        paths.log.open("ab") as log,
        # In a session of its own: Ctrl-C ends the training, which needs the server until then.
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
        ) as process,
    ):
        try:
            code = process.wait(_START_SECONDS)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            raise NodeCacheError(
                f"The cache server of this node was not ready after {_START_SECONDS:.0f} seconds: the disk of the "
                f"cache, or that of Python's libraries, hangs. {_log_tail(paths)}"
            ) from error
    if code:
        raise NodeCacheError(f"The cache server of this node cannot start. {_log_tail(paths)}")


def _log_tail(paths: ServerPaths) -> str:
    text = ""
    with suppress(OSError):
        text = paths.log.read_text(errors="replace")[-_LOG_TAIL:].strip()
    return (
        f"It said last: {text}" if text else f"It left no message in {paths.log}: it was killed, as for want of memory."
    )


def _after_fork_in_child() -> None:
    """Give each object in a forked child a lock and a connection of its own.

    The child's copy of the connection would keep it open after the parent has ended. And nobody releases a lock in the
    child that a thread of the parent held at the fork.
    """
    for each in list(_all):
        each._lock = threading.RLock()
        link, each._link = each._link, None
        if link is not None:
            link.close_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
