"""What the server does: opens sets, answers with records, and stores what was fetched."""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from azureml_strategy.data.node_cache.blocks import make_blocks
from azureml_strategy.data.node_cache.cache_folder import CacheFolder
from azureml_strategy.data.node_cache.eviction import Evictor, Ordered
from azureml_strategy.data.node_cache.fetching import Fetched, Fetcher, OpenSet
from azureml_strategy.data.node_cache.indexes import Version, look, read_index
from azureml_strategy.data.node_cache.mounts import double_cache
from azureml_strategy.data.node_cache.orders import Orders
from azureml_strategy.data.node_cache.prefetch import Prefetcher
from azureml_strategy.data.node_cache.protocol import CacheSettings, Meeting
from azureml_strategy.data.shard_index import INDEX_NAME, ShardIndex
from azureml_strategy.data.storage import Storage, StorageError, is_remote, open_storage
from azureml_strategy.data.storage.variables import Variables

# What one turn of the disk's thread takes: some 6 MB of records of 100 kB.
_AT_ONCE = 64

# A damaged shard is told at once; then its other records may still be had one by one. Storage that cannot be reached
# has been tried for minutes, and is not tried again.
_QUICK_SECONDS = 10.0
_Result = TypeVar("_Result")


class Keeper:
    """The sets of a node, and what is kept of them.

    Args:
        settings: of the cache.
        place: where the server is met; indexes lie beside it where there is no cache.
        counters: of all clients.
        read: tells how many samples of a set the processes of each rank have read.
    """

    def __init__(
        self,
        settings: CacheSettings,
        place: Meeting,
        counters: NDArray[np.int64],
        read: Callable[[OpenSet], dict[str, int]],
    ) -> None:
        self._settings, self._place, self._counters, self._read = settings, place, counters, read
        self._notices: list[str] = []
        self._opening: dict[tuple[str, str], asyncio.Task[tuple[OpenSet, Version]]] = {}
        self._making = asyncio.Lock()
        self._sets: dict[tuple[str, ...], OpenSet] = {}
        self._prefetchers: dict[str, tuple[Prefetcher, asyncio.Task[None]]] = {}
        self._folder = self._open_folder()
        self._queue: asyncio.Queue[Fetched] = asyncio.Queue()
        self._fetcher = Fetcher(self._queue)
        self._stored = 0
        self._evictor = Evictor(self._folder, self._ordered) if self._folder else None
        self._storing: asyncio.Task[None] | None = None
        # Whatever changes the cache is done by one thread, in order.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")

    def _open_folder(self) -> CacheFolder | None:
        folder = self._settings.folder
        if folder is None:
            return None
        try:
            return CacheFolder(folder, self._settings.limit)
        except OSError as error:
            self._notice(f"{folder} cannot be used: {_reason(error)}")
            return None

    def _notice(self, reason: str) -> None:
        self._notices.append(
            f"The node's cache is off: {reason}. Samples are fetched from storage whenever they are read, which is "
            "slower; none is lost. Give the cache another folder on a local disk, or a lower limit."
        )

    def take_notices(self) -> list[str]:
        """Return what users have to know, once."""
        notices, self._notices = self._notices, []
        return notices

    def facts(self) -> dict[str, object]:
        """Return what a client has to know of the cache."""
        return {"limit": self._settings.limit, "block_bytes": self._block_bytes()}

    def statistics(self) -> dict[str, int]:
        """Return what was done so far."""
        return {
            "requests": self._fetcher.requests,
            "fetched_bytes": self._fetcher.bytes,
            "stored_blocks": self._stored,
            "evicted_blocks": self._evictor.evicted if self._evictor else 0,
            "cache_bytes": self._folder.bytes if self._folder else 0,
            "pid": os.getpid(),
        }

    def _block_bytes(self) -> int:
        # Without a cache a record is fetched alone: what comes with it would be lost.
        return self._settings.block_bytes if self._folder else 1

    async def open(self, address: str, environ: Variables, known: str) -> OpenSet:
        """Open a set, once for all clients that read it with the same rights.

        Args:
            address: of the set.
            environ: the client's variables that storage reads; none for a folder.
            known: the digest of the set that the client has open already; empty when it begins. One that begins gets
                the set as it is now, and the others go on with what they had.

        Raises:
            OSError: it cannot be reached.
            ValueError: it has no index that can be used.
        """
        had = self._sets.get(self._key(address, environ, known))
        if had is not None:
            return had
        key = (address, environ.mark)
        opening = self._opening.get(key)
        if opening is not None and opening.done() and await self._is_outdated(address, environ, opening.result()[1]):
            # Unless another client has noticed it too, and was faster.
            self._opening = {each: task for each, task in self._opening.items() if task is not opening}
        if key not in self._opening:
            self._opening[key] = asyncio.ensure_future(self._open(address, environ))
        try:
            return (await asyncio.shield(self._opening[key]))[0]
        except Exception:
            self._opening.pop(key, None)
            raise

    async def _is_outdated(self, address: str, environ: Variables, version: Version) -> bool:
        """Whether a set was written anew since it was opened, or its address leads to another one by now."""
        storage = open_storage(address, environ)
        try:
            return await look(storage) != version
        finally:
            await storage.close()

    def _key(self, address: str, environ: Variables, digest: str) -> tuple[str, ...]:
        # What a cache holds of a set is that of all its copies: whoever opens it has read the same index by his own
        # rights. Without a cache each address is read for itself, by each client's own rights.
        return (digest,) if self._folder else (address, environ.mark, digest)

    async def _open(self, address: str, environ: Variables) -> tuple[OpenSet, Version]:
        storage = open_storage(address, environ)
        try:
            version = await look(storage)
            index = await self._index(address, storage, version)
            digest = await asyncio.to_thread(lambda: index.digest)
        except BaseException:
            await storage.close()
            raise
        key = self._key(address, environ, digest)
        async with self._making:  # the same set may be opened by clients of other rights at the same time
            if (opened := self._sets.get(key)) is None:
                self._sets[key] = opened = await self._make(address, storage, index, digest)
                await self._shrink()  # by now the set is one of those that can give way
                return opened, version
        # The newest one knows the files as they are now, and its rights are the freshest.
        opened.storage, storage = storage, opened.storage
        await storage.close()
        return opened, version

    async def _index(self, address: str, storage: Storage, version: Version) -> ShardIndex:
        from azureml_strategy.data.readers import find_index  # which imports this package

        if not is_remote(address):  # an index that was made beside tars may be older than they are
            return await asyncio.to_thread(find_index, Path(address).expanduser())
        return await read_index(storage, version, self._place.socket.parent)

    async def _make(self, address: str, storage: Storage, index: ShardIndex, digest: str) -> OpenSet:
        table = await asyncio.to_thread(make_blocks, index, self._block_bytes())
        orders = Orders(table, self._counters)
        # Its own: another server of this user, which takes its files with it, may have the same set open.
        path = self._place.socket.with_name(f"{self._place.socket.stem}-{digest}.npz")
        opened = OpenSet(address, storage, index, digest, table, str(path), orders)
        if self._folder and not is_remote(address):
            self._notices += filter(None, [double_cache(Path(address), os.environ)])
        if self._folder is not None and self._evictor is not None:
            try:
                opened.cached = await self._on_disk(
                    self._folder.open_set, index, table, digest, self._settings.block_bytes
                )
                self._start_storing()
            except OSError as error:
                self._turn_off(error)
        if opened.cached is not None:
            opened.index_file = str(opened.cached.folder / INDEX_NAME)
        else:
            await asyncio.to_thread(index.save, path)
        return opened

    async def _shrink(self) -> None:
        """Have the limit hold, which may be lower than that of the job that has left the cache."""
        if self._evictor is None:
            return
        try:
            await self._on_disk(self._evictor.shrink)
        except OSError as error:
            self._turn_off(error)

    def _ordered(self) -> list[Ordered]:
        return [Ordered(each.cached, each.orders, each.users > 0) for each in list(self._sets.values()) if each.cached]

    def expect(
        self, of: OpenSet, rank: str, this: NDArray[np.int64], following: NDArray[np.int64], slot: int, read: int
    ) -> None:
        """Take a rank's order, and prefetch by it."""
        of.orders.expect(rank, this, following, slot, read)
        self._orders_changed(of)

    def forget(self, of: OpenSet, rank: str) -> None:
        """A rank has gone."""
        of.orders.forget(rank)
        self._orders_changed(of)

    def _orders_changed(self, of: OpenSet) -> None:
        if self._evictor is None or self._folder is None or of.cached is None:
            return
        self._evictor.forget()
        if of.digest not in self._prefetchers:
            prefetcher = Prefetcher(of, of.cached, self._folder, self._fetcher, lambda: self._read_of(of))
            task = asyncio.ensure_future(prefetcher.run())
            task.add_done_callback(self._prefetch_ended)
            self._prefetchers[of.digest] = (prefetcher, task)
        self._prefetchers[of.digest][0].changed()

    def _prefetch_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._turn_off(error)

    def _read_of(self, of: OpenSet) -> dict[str, int]:
        read = self._read(of)
        return {rank: read.get(rank, 0) for rank in of.orders.ranks()}

    async def records(
        self, of: OpenSet, numbers: list[int], damaged: set[int]
    ) -> list[bytes | memoryview | Exception | None]:
        """Get records.

        Args:
            of: the set.
            numbers: of the samples.
            damaged: those that a client has found damaged in the cache, or not to be read there.

        Returns:
            each record, or why it cannot be had, or None if it is in the cache by now.
        """
        for block in {int(of.table.of[number]) for number in damaged}:
            await self._drop_if_damaged(of, block)
        wanted = [number for number in numbers if number in damaged or not self._is_there(of, number)]
        began = time.monotonic()
        arrived = await self._fetcher.demand(of, {int(of.table.of[number]) for number in wanted})
        found: dict[int, bytes | memoryview | Exception] = {}
        failed = []
        for number in wanted:
            future = arrived[int(of.table.of[number])]
            if future.exception() is None:
                found[number] = _record(of, number, future.result())
            else:
                failed.append(number)
        if time.monotonic() - began < _QUICK_SECONDS:
            found.update(zip(failed, await self._fetcher.records(of, failed), strict=True))
        else:
            found.update((number, _error(arrived[int(of.table.of[number])])) for number in failed)
        return [found.get(number) for number in numbers]

    def _is_there(self, of: OpenSet, number: int) -> bool:
        return of.cached is not None and bool(of.cached.shared.present[of.table.of[number]])

    async def _drop_if_damaged(self, of: OpenSet, block: int) -> None:
        """Remove a block from the cache that a client could not use."""
        if of.cached is None or not of.cached.shared.present[block] or of.busy[block]:
            return
        try:
            await self._on_disk(of.cached.remove, block)
        except OSError as error:
            self._turn_off(error)

    def _start_storing(self) -> None:
        if self._storing is None:
            self._storing = asyncio.ensure_future(self._store())

    async def _store(self) -> None:
        """Store what arrives, one batch after another, until cancelled."""
        while True:
            batch = [await self._queue.get()]
            while not self._queue.empty() and len(batch) < _AT_ONCE:
                batch.append(self._queue.get_nowait())
            try:
                stored = await self._on_disk(self._store_all, batch)
            except Exception as error:  # of whatever kind: what is fetched must not pile up in memory
                self._turn_off(error)
                stored = [False] * len(batch)
            for each, done in zip(batch, stored, strict=True):
                each.stored.set_result(done)

    async def _on_disk(self, work: Callable[..., _Result], *arguments: object) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *arguments)

    def _store_all(self, batch: list[Fetched]) -> list[bool]:
        return [self._store_one(each) for each in batch]

    def _store_one(self, fetched: Fetched) -> bool:
        cached, complete = fetched.of.cached, True
        for block, content in fetched.blocks:
            if cached is None or self._evictor is None:
                return False
            if not _is_sound(fetched.of, block, content) or not self._evictor.make_room(cached, block):
                complete = False
                continue
            cached.write(block, content)
            self._stored += 1
        return complete

    def _turn_off(self, error: BaseException) -> None:
        """Store nothing any more. What is there may still be read."""
        if self._evictor is None:
            return
        self._evictor = None
        if not isinstance(error, OSError):
            traceback.print_exception(error)
        for each in self._sets.values():
            each.cached = None
        for _, task in self._prefetchers.values():
            task.cancel()
        self._prefetchers.clear()
        self._notice(f"{self._settings.folder}: {_reason(error)}")

    async def close(self) -> None:
        """Close the storage of all sets."""
        for task in (self._storing, *(task for _, task in self._prefetchers.values())):
            if task is not None:
                task.cancel()
        for each in self._sets.values():
            await each.storage.close()
            if Path(each.index_file).parent == self._place.socket.parent:
                Path(each.index_file).unlink(missing_ok=True)


def _record(of: OpenSet, number: int, block: memoryview) -> memoryview:
    begin = int(of.index.offset[number] - of.table.start[of.table.of[number]])
    return block[begin : begin + int(of.index.length[number])]


def _error(failed: asyncio.Future[memoryview]) -> Exception:
    error = failed.exception()
    return error if isinstance(error, StorageError) else StorageError(f"{type(error).__name__}: {error}")


def _is_sound(of: OpenSet, block: int, content: memoryview) -> bool:
    """Whether all records of a block have their checksum: a damaged one is fetched anew each time, and not kept."""
    return all(crc32(_record(of, each, content)) == of.index.checksum[each] for each in of.table.samples(block))


def _reason(error: BaseException) -> str:
    return (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
