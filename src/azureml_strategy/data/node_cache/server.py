"""The cache server of a node: it fetches, keeps and evicts for all training processes and workers of the node."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from azureml_strategy.control.process import Member, is_gone, shares_process_table
from azureml_strategy.data.node_cache.cache import CacheManager
from azureml_strategy.data.node_cache.fetching import OpenSet
from azureml_strategy.data.node_cache.protocol import (
    LONGEST_HEADER,
    QUEUE,
    SLOTS,
    WORKING_SECONDS,
    CacheSettings,
    Frame,
    ServerPaths,
    encode,
    map_counters,
    numbers_of,
    receive,
)
from azureml_strategy.data.storage.credentials import Variables

# The server ends so long after its last client has left, which may come again, or so long after its start without one.
_LINGER_SECONDS, _FIRST_SECONDS = 1.0, 60.0
_CHECK_SECONDS = 0.25
# In place of the size of a record: it is in the cache now, or it cannot be read.
CACHED, FAILED = -1, -2

_Answer = tuple[dict[str, Any], list[bytes | memoryview]]


@dataclass(eq=False)
class _Client:
    """A connection.

    Attributes:
        slot: of its counters.
        owner: the training process that it belongs to: that of a worker is the process that started it.
        own: whether it is the connection of the owner itself.
        reader: the name of a rank's use of a set, which the connections of its workers share.
        opened: the set that it reads.
    """

    slot: int
    owner: Member | None = None
    own: bool = False
    reader: str = ""
    opened: OpenSet | None = None

    @property
    def lives(self) -> bool:
        """Whether the training still runs: a worker may outlive it."""
        return self.owner is not None and (self.own or (shares_process_table(self.owner) and not is_gone(self.owner)))


class Server:
    """Answers the clients."""

    def __init__(self, settings: CacheSettings, paths: ServerPaths) -> None:
        self._paths = paths
        # A new file: clients of an earlier server may still have the old one.
        paths.slots.unlink(missing_ok=True)
        with paths.slots.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 16 * SLOTS)
        self._counters = map_counters(paths.slots)
        self._clients: set[_Client] = set()
        self._slots = set(range(SLOTS))
        # Samples read by processes that have ended, by rank and set.
        self._read_before: Counter[tuple[str, OpenSet]] = Counter()
        self._manager = CacheManager(settings, paths, self._counters, self._read)
        self._had_clients = False

    async def serve(self, listening: Any, started: Callable[[], None]) -> None:
        """Serve until the last client has gone; call `started` when clients can connect."""
        server = await asyncio.start_unix_server(
            self._handle_client, sock=listening, limit=LONGEST_HEADER, backlog=QUEUE
        )
        started()
        try:
            idle = 0.0
            while idle < (_LINGER_SECONDS if self._had_clients else _FIRST_SECONDS):
                await asyncio.sleep(_CHECK_SECONDS)
                idle = 0.0 if any(client.lives for client in list(self._clients)) else idle + _CHECK_SECONDS
        finally:
            self._paths.socket.unlink(missing_ok=True)
            self._paths.slots.unlink(missing_ok=True)
            server.close()
            await self._manager.close()

    async def _handle_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client(self._slots.pop())
        self._counters[client.slot] = 0
        self._clients.add(client)
        self._had_clients = True
        try:
            while (frame := await receive(reader)) is not None:
                await self._answer(client, frame, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # it was killed
        finally:
            writer.close()
            self._leave(client)

    def _leave(self, client: _Client) -> None:
        self._clients.discard(client)
        if client.opened is not None:
            self._read_before[client.reader, client.opened] += int(self._counters[client.slot, 1])
            if client.own:
                self._manager.forget(client.opened, client.reader)
            client.opened.users -= 1
        self._slots.add(client.slot)

    async def _answer(self, client: _Client, frame: Frame, writer: asyncio.StreamWriter) -> None:
        """Answer a request. Until the answer is ready, say now and then that it is being worked on."""
        work = asyncio.ensure_future(self._work(client, frame))
        while not (await asyncio.wait([work], timeout=WORKING_SECONDS))[0]:
            writer.write(encode({"working": True}))
            await writer.drain()
        header, parts = work.result()
        header["notices"] = self._manager.take_notices()
        header["bytes"] = sum(len(part) for part in parts)
        writer.write(json.dumps(header).encode() + b"\n")
        for part in parts:
            writer.write(part)
        await writer.drain()

    async def _work(self, client: _Client, frame: Frame) -> _Answer:
        answer: Callable[[_Client, Frame], Awaitable[_Answer]] = {
            "open": self._open,
            "read": self._read_records,
            "expect": self._expect,
            "statistics": self._statistics,
        }[frame.header["ask"]]
        try:
            return await answer(client, frame)
        except Exception as error:  # of any kind: the client waits for an answer
            if not isinstance(error, (OSError, ValueError)):
                traceback.print_exc()
            return {"error": str(error) or type(error).__name__, "kind": type(error).__name__}, []

    async def _open(self, client: _Client, frame: Frame) -> _Answer:
        header = frame.header
        client.owner, client.own, client.reader = Member(**header["owner"]), header["own"], header["reader"]
        opened = await self._manager.open(header["address"], Variables(header.pop("environ")), header["known"])
        if client in self._clients:  # a client that was killed meanwhile would count as a user for ever
            client.opened = opened
            opened.users += 1
        cached = str(opened.cached.folder) if opened.cached else None
        facts = {"digest": opened.digest, "index": opened.index_file, "cached": cached, "slot": client.slot}
        return {**facts, **self._manager.facts()}, []

    async def _read_records(self, client: _Client, frame: Frame) -> _Answer:
        assert client.opened is not None
        numbers = numbers_of(frame.payload).tolist()
        found = await self._manager.records(
            client.opened, numbers, set(numbers[len(numbers) - frame.header["damaged"] :])
        )
        sizes = [CACHED if each is None else FAILED if isinstance(each, Exception) else len(each) for each in found]
        errors = {place: str(each) for place, each in enumerate(found) if isinstance(each, Exception)}
        parts = [each for each in found if each is not None and not isinstance(each, Exception)]
        return {"sizes": sizes, "errors": errors}, parts

    async def _expect(self, client: _Client, frame: Frame) -> _Answer:
        assert client.opened is not None
        numbers = numbers_of(frame.payload)
        length = frame.header["length"]
        self._counters[client.slot, 0] = 0
        read = self._read(client.opened).get(client.reader, 0)
        self._manager.expect(client.opened, client.reader, numbers[:length], numbers[length:], client.slot, read)
        return {}, []

    async def _statistics(self, client: _Client, frame: Frame) -> _Answer:
        return {"statistics": self._manager.statistics()}, []

    def _read(self, opened: OpenSet) -> dict[str, int]:
        """Return how many samples of a set the processes of each rank have read."""
        read = Counter({rank: count for (rank, each), count in self._read_before.items() if each is opened})
        for client in self._clients:
            if client.opened is opened:
                read[client.reader] += int(self._counters[client.slot, 1])
        return read


def serve(settings: CacheSettings, paths: ServerPaths, listening: Any, started: Callable[[], None]) -> None:
    """Run a server until its last client has gone. Then the process ends at once: threads may wait for a dead mount."""

    async def run() -> None:
        await Server(settings, paths).serve(listening, started)
        sys.stderr.flush()
        os._exit(0)

    asyncio.run(run())
