"""The cache server of a node: it fetches, keeps and evicts for all training processes and workers of the machine."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from azureml_strategy.control.process import Member, is_gone, shares_process_table
from azureml_strategy.data.node_cache.fetching import OpenSet
from azureml_strategy.data.node_cache.keeper import Keeper
from azureml_strategy.data.node_cache.protocol import (
    LONGEST_HEADER,
    QUEUE,
    SLOTS,
    WORKING_SECONDS,
    CacheSettings,
    Frame,
    Meeting,
    encode,
    map_counters,
    numbers_of,
    receive,
)
from azureml_strategy.data.storage.variables import Variables

# The server ends so long after its last client, which may be about to come again; and if none has come at all.
_LINGER_SECONDS, _FIRST_SECONDS = 1.0, 60.0
_LOOK_SECONDS = 0.25
THERE, FAILED = -1, -2


@dataclass(eq=False)
class _Client:
    """A connection.

    Attributes:
        slot: of its counters.
        owner: the training process that it belongs to; a worker's is not its own process.
        own: whether it is the owner's connection.
        reader: what tells the rank, and a set's use by it, from others; its workers' connections have the same.
        of: the set that it reads.
    """

    slot: int
    owner: Member | None = None
    own: bool = False
    reader: str = ""
    of: OpenSet | None = None

    @property
    def lives(self) -> bool:
        """Whether the training goes on: a worker may outlive it."""
        return self.owner is not None and (self.own or (shares_process_table(self.owner) and not is_gone(self.owner)))


class Server:
    """Answers the clients.

    Args:
        settings: of the cache.
        place: where clients find it.
    """

    def __init__(self, settings: CacheSettings, place: Meeting) -> None:
        self._place = place
        self._counters = _new_counters(place.slots)
        self._clients: set[_Client] = set()
        self._slots = set(range(SLOTS))
        # Samples that processes have read that are gone, by rank and set.
        self._read_before: dict[tuple[str, OpenSet], int] = {}
        self._keeper = Keeper(settings, place, self._counters, self._read)
        self._had_clients = False

    async def serve(self, listening: Any, started: Callable[[], None]) -> None:
        """Serve until the last client has gone.

        Args:
            listening: the socket.
            started: called when clients can connect.
        """
        server = await asyncio.start_unix_server(self._attend, sock=listening, limit=LONGEST_HEADER, backlog=QUEUE)
        started()
        try:
            await self._last_client()
        finally:
            self._place.socket.unlink(missing_ok=True)
            self._place.slots.unlink(missing_ok=True)
            server.close()
            await self._keeper.close()

    async def _last_client(self) -> None:
        silent = 0.0
        while silent < (_LINGER_SECONDS if self._had_clients else _FIRST_SECONDS):
            await asyncio.sleep(_LOOK_SECONDS)
            silent = 0.0 if any(client.lives for client in list(self._clients)) else silent + _LOOK_SECONDS

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
        if client.of is not None:
            key = (client.reader, client.of)
            self._read_before[key] = self._read_before.get(key, 0) + int(self._counters[client.slot, 1])
            if client.own:
                self._keeper.forget(client.of, client.reader)
            client.of.users -= 1
        self._slots.add(client.slot)

    async def _answer(self, client: _Client, frame: Frame, writer: asyncio.StreamWriter) -> None:
        """Answer a request, and tell meanwhile that it is being worked on."""
        work = asyncio.ensure_future(self._work(client, frame))
        while not (await asyncio.wait([work], timeout=WORKING_SECONDS))[0]:
            writer.write(encode({"working": True}))
            await writer.drain()
        header, parts = work.result()
        header["notices"] = self._keeper.take_notices()
        header["bytes"] = sum(len(part) for part in parts)
        writer.write(json.dumps(header).encode() + b"\n")
        for part in parts:
            writer.write(part)
        await writer.drain()

    async def _work(self, client: _Client, frame: Frame) -> tuple[dict[str, Any], list[bytes | memoryview]]:
        answer: Callable[[_Client, Frame], Awaitable[tuple[dict[str, Any], list[bytes | memoryview]]]] = {
            "open": self._open,
            "read": self._read_records,
            "expect": self._expect,
            "statistics": self._statistics,
        }[frame.header["ask"]]
        try:
            return await answer(client, frame)
        except Exception as error:  # whatever it is: the client has to be told
            if not isinstance(error, (OSError, ValueError)):
                traceback.print_exc()
            return {"error": str(error) or type(error).__name__, "kind": type(error).__name__}, []

    async def _open(self, client: _Client, frame: Frame) -> tuple[dict[str, Any], list[bytes | memoryview]]:
        header = frame.header
        client.owner, client.own, client.reader = Member(**header["owner"]), header["own"], header["reader"]
        of = await self._keeper.open(header["address"], Variables(header.pop("environ")), header["known"])
        if client in self._clients:  # one that was killed meanwhile would count as a user for ever
            client.of = of
            of.users += 1
        cached = str(of.cached.folder) if of.cached else None
        facts = {"digest": of.digest, "index": of.index_file, "cached": cached, "slot": client.slot}
        return {**facts, **self._keeper.facts()}, []

    async def _read_records(self, client: _Client, frame: Frame) -> tuple[dict[str, Any], list[bytes | memoryview]]:
        assert client.of is not None
        numbers = numbers_of(frame.payload).tolist()
        found = await self._keeper.records(client.of, numbers, set(numbers[len(numbers) - frame.header["damaged"] :]))
        sizes = [THERE if each is None else FAILED if isinstance(each, Exception) else len(each) for each in found]
        errors = {place: str(each) for place, each in enumerate(found) if isinstance(each, Exception)}
        parts = [each for each in found if each is not None and not isinstance(each, Exception)]
        return {"sizes": sizes, "errors": errors}, parts

    async def _expect(self, client: _Client, frame: Frame) -> tuple[dict[str, Any], list[bytes | memoryview]]:
        assert client.of is not None
        numbers = numbers_of(frame.payload)
        length = frame.header["length"]
        self._counters[client.slot, 0] = 0
        read = self._read(client.of).get(client.reader, 0)
        self._keeper.expect(client.of, client.reader, numbers[:length], numbers[length:], client.slot, read)
        return {}, []

    async def _statistics(self, client: _Client, frame: Frame) -> tuple[dict[str, Any], list[bytes | memoryview]]:
        return {"statistics": self._keeper.statistics()}, []

    def _read(self, of: OpenSet) -> dict[str, int]:
        """How many samples of a set the processes of each rank have read."""
        read = {rank: count for (rank, each), count in self._read_before.items() if each is of}
        for client in self._clients:
            if client.of is of:
                read[client.reader] = read.get(client.reader, 0) + int(self._counters[client.slot, 1])
        return read


def _new_counters(path: Path) -> NDArray[np.int64]:
    # A new file: clients of a server before may still have the old one.
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 16 * SLOTS)
    return map_counters(path)


def serve(settings: CacheSettings, place: Meeting, listening: Any, started: Callable[[], None]) -> None:
    """Run a server until its last client has gone. Then the process ends at once: threads may wait for a dead mount.

    Args:
        settings: of the cache.
        place: where clients find it.
        listening: the socket.
        started: called when clients can connect.
    """

    async def run() -> None:
        await Server(settings, place).serve(listening, started)
        sys.stderr.flush()
        os._exit(0)

    asyncio.run(run())
