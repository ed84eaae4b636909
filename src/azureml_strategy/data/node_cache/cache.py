"""What the server does: opens sets with their indexes, answers with records, and stores what was fetched."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from azureml_strategy.data.node_cache.cache_folder import CacheFolder
from azureml_strategy.data.node_cache.eviction import EvictableSet, Evictor, ReadSchedule
from azureml_strategy.data.node_cache.fetching import Fetched, Fetcher, OpenSet, Prefetcher, as_storage_error
from azureml_strategy.data.node_cache.protocol import CacheSettings, ServerPaths, make_blocks
from azureml_strategy.data.shard_index import INDEX_NAME, ShardIndex, ShardIndexError, load_index
from azureml_strategy.data.storage import Storage, is_remote, open_storage
from azureml_strategy.data.storage.credentials import Variables
from azureml_strategy.network.doctor.disks import mount_of, read_mounts

# Variables of Azure ML's data runtime, which mounts the inputs of a job: best-practices, largescale-deep-learning.
_BLOCKS, _WHOLE = "DATASET_MOUNT_BLOCK_FILE_CACHE_ENABLED", "DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED"

# Ranges that the disk's thread stores in one go: some 6 MB of records of 100 kB.
_AT_ONCE = 64
# A damaged shard fails at once, and then its records are read one by one. Storage that cannot be reached fails after
# minutes of tries, and is not asked again.
_QUICK_SECONDS = 10.0
_Result = TypeVar("_Result")


def double_cache_warning(folder: Path, environ: Mapping[str, str], proc: Path = Path("/proc")) -> str:
    """Say what to switch off if the mount of a folder keeps what the node's cache keeps as well; else return ''."""
    mount = mount_of(folder.resolve(), read_mounts(proc))
    if mount is None or not mount.is_remote:
        return ""
    off = environ.get(_BLOCKS, "").lower() == "false" and environ.get(_WHOLE, "true").lower() != "false"
    if off or not mount.kind.startswith("fuse"):
        return ""
    return (
        f"{folder} lies on {mount.target}, a mount ({mount.kind}) that keeps what is read on this node's disk too, "
        "beside the node's cache: every byte twice. Switch one of them off. The mount's of Azure ML: "
        f"job.inputs.NAME.access=once, which sets {_BLOCKS}=false and DATASET_MOUNT_MEMORY_CACHE_SIZE=0; of blobfuse2: "
        "no file_cache among its components. Or read the shards without a mount, by their address: az://CONTAINER/PATH."
    )


class Version(NamedTuple):
    """One state of a set. If it has changed, the index of the set may have changed."""

    place: str  # what the address leads to
    files: dict[str, str]  # versions of the files that the index comes from: of `index.npz`, or of all if there is none


async def find_version(storage: Storage) -> Version:
    """Find the version of a set as it is now.

    Raises:
        StorageError: it cannot be listed.
    """
    place, files = await storage.place(), await storage.versions()
    return Version(place, {INDEX_NAME: files[INDEX_NAME]} if INDEX_NAME in files else files)


async def read_index(storage: Storage, version: Version, folder: Path) -> ShardIndex:
    """Read the index of a set, or make it and keep it in a folder where only this user can write.

    The version was found before: the next `find_version` notices what has changed after that.

    Raises:
        StorageError: it cannot be read.
        ShardIndexError: it is damaged; or there is none, and the tars are no data set.
    """
    if INDEX_NAME in version.files:
        size = (await storage.list())[INDEX_NAME]
        content = await storage.read(INDEX_NAME, 0, size)
        return await asyncio.to_thread(load_index, bytes(content), f"{storage.address}/{INDEX_NAME}")
    from azureml_strategy.data.tar_index import index_storage

    name = hashlib.sha256(repr((version.place, sorted(version.files.items()))).encode()).hexdigest()[:16]
    path = folder / f"{name}.npz"
    with suppress(ShardIndexError):  # not there yet, or damaged by a power cut
        return await asyncio.to_thread(load_index, path)
    index = await index_storage(storage)
    await asyncio.to_thread(index.save, path)
    return index


class CacheManager:
    """The sets that a node has open, and what it keeps of them. Without a cache, indexes lie beside the server's files.

    `read` returns how many samples of a set the processes of each rank have read.
    """

    def __init__(
        self,
        settings: CacheSettings,
        paths: ServerPaths,
        counters: NDArray[np.int64],
        read: Callable[[OpenSet], dict[str, int]],
    ) -> None:
        self._settings, self._paths, self._counters, self._read = settings, paths, counters, read
        self._notices: list[str] = []
        self._opening: dict[tuple[str, str], asyncio.Task[tuple[OpenSet, Version]]] = {}
        self._making = asyncio.Lock()
        self._sets: dict[tuple[str, ...], OpenSet] = {}
        self._prefetchers: dict[str, tuple[Prefetcher, asyncio.Task[None]]] = {}
        self._folder: CacheFolder | None = None
        if settings.folder is not None:
            try:
                self._folder = CacheFolder(settings.folder, settings.limit)
            except OSError as error:
                self._notice(f"{settings.folder} cannot be used: {_reason(error)}")
        self._queue: asyncio.Queue[Fetched] = asyncio.Queue()
        self._fetcher = Fetcher(self._queue)
        self._stored = 0
        self._evictor = Evictor(self._folder, self._evictable_sets) if self._folder else None
        self._storing: asyncio.Task[None] | None = None
        # One thread makes all changes of the cache, in order.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")

    def _notice(self, reason: str) -> None:
        self._notices.append(
            f"The node's cache is off: {reason}. Samples are fetched from storage whenever they are read, which is "
            "slower; none is lost. Give the cache another folder on a local disk, or a lower limit."
        )

    def take_notices(self) -> list[str]:
        """Return the warnings for users that were not returned before."""
        notices, self._notices = self._notices, []
        return notices

    def facts(self) -> dict[str, object]:
        """Return the facts about the cache that a client needs."""
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
        # Without a cache, each record is fetched alone: nobody would use its neighbours.
        return self._settings.block_bytes if self._folder else 1

    async def open(self, address: str, environ: Variables, known: str) -> OpenSet:
        """Open a set, once for all clients that read it with the same rights.

        Args:
            address: of the set.
            environ: the client's variables that storage reads; none for a folder.
            known: the digest of the set that the client had open before, which it gets again. It is empty for a new
                client, which gets the set as it is now.

        Raises:
            OSError: it cannot be reached.
            ValueError: it has no index that can be used.
        """
        opened = self._sets.get(self._key(address, environ, known))
        if opened is not None:
            return opened
        key = (address, environ.mark)
        opening = self._opening.get(key)
        if opening is not None and opening.done() and await self._is_outdated(address, environ, opening.result()[1]):
            # Another client may have replaced it meanwhile; that newer task stays.
            self._opening = {each: task for each, task in self._opening.items() if task is not opening}
        if key not in self._opening:
            self._opening[key] = asyncio.ensure_future(self._open(address, environ))
        try:
            return (await asyncio.shield(self._opening[key]))[0]
        except Exception:
            self._opening.pop(key, None)
            raise

    async def _is_outdated(self, address: str, environ: Variables, version: Version) -> bool:
        """Whether a set was written again since it was opened, or its address leads to another set now."""
        storage = open_storage(address, environ)
        try:
            return await find_version(storage) != version
        finally:
            await storage.close()

    def _key(self, address: str, environ: Variables, digest: str) -> tuple[str, ...]:
        # All copies of a set share what the cache holds of it: whoever opens a copy has read the same index with rights
        # of its own. Without a cache, each address is read separately, with the rights of each client.
        return (digest,) if self._folder else (address, environ.mark, digest)

    async def _open(self, address: str, environ: Variables) -> tuple[OpenSet, Version]:
        storage = open_storage(address, environ)
        try:
            version = await find_version(storage)
            index = await self._index(address, storage, version)
            digest = await asyncio.to_thread(lambda: index.digest)
        except BaseException:
            await storage.close()
            raise
        key = self._key(address, environ, digest)
        async with self._making:  # clients with other rights may open the same set at the same time
            if (opened := self._sets.get(key)) is None:
                self._sets[key] = opened = await self._make(address, storage, index, digest)
                # Until the limit holds: the job that has left the cache may have had a higher one. Only now is this set
                # among those that blocks can be evicted from.
                if self._evictor is not None:
                    await self._change(self._evictor.shrink)
                return opened, version
        # The newest storage knows the files as they are now, and its credentials are the freshest.
        opened.storage, storage = storage, opened.storage
        await storage.close()
        return opened, version

    async def _index(self, address: str, storage: Storage, version: Version) -> ShardIndex:
        from azureml_strategy.data.readers import find_index  # which imports this package

        if not is_remote(address):  # an index that was made beside tars may be older than they are
            return await asyncio.to_thread(find_index, Path(address).expanduser())
        return await read_index(storage, version, self._paths.socket.parent)

    async def _make(self, address: str, storage: Storage, index: ShardIndex, digest: str) -> OpenSet:
        table = await asyncio.to_thread(make_blocks, index, self._block_bytes())
        schedule = ReadSchedule(table, self._counters)
        # Named after this server: another server of this user may have the same set open, and removes its own file.
        path = self._paths.socket.with_name(f"{self._paths.socket.stem}-{digest}.npz")
        opened = OpenSet(storage, index, digest, table, str(path), schedule)
        if self._folder and not is_remote(address):
            self._notices += filter(None, [double_cache_warning(Path(address), os.environ)])
        if self._folder is not None and self._evictor is not None:
            opened.cached = await self._change(self._folder.open_set, index, table, digest, self._settings.block_bytes)
        if opened.cached is not None:
            self._storing = self._storing or asyncio.ensure_future(self._store())
            opened.index_file = str(opened.cached.folder / INDEX_NAME)
        else:
            await asyncio.to_thread(index.save, path)
        return opened

    def _evictable_sets(self) -> list[EvictableSet]:
        return [
            EvictableSet(each.cached, each.schedule, each.users > 0)
            for each in list(self._sets.values())
            if each.cached
        ]

    def expect(
        self, opened: OpenSet, rank: str, this: NDArray[np.int64], following: NDArray[np.int64], slot: int, read: int
    ) -> None:
        """Take note of the order in which a rank will read, and prefetch in this order."""
        opened.schedule.expect(rank, this, following, slot, read)
        self._schedule_changed(opened)

    def forget(self, opened: OpenSet, rank: str) -> None:
        """Forget the order of a rank that has ended."""
        opened.schedule.forget(rank)
        self._schedule_changed(opened)

    def _schedule_changed(self, opened: OpenSet) -> None:
        if self._evictor is None or self._folder is None or opened.cached is None:
            return
        self._evictor.forget()
        if opened.digest not in self._prefetchers:

            def read() -> dict[str, int]:
                counts = self._read(opened)
                return {rank: counts.get(rank, 0) for rank in opened.schedule.ranks()}

            prefetcher = Prefetcher(opened, opened.cached, self._folder, self._fetcher, read)
            task = asyncio.ensure_future(prefetcher.run())
            task.add_done_callback(self._prefetch_ended)
            self._prefetchers[opened.digest] = (prefetcher, task)
        self._prefetchers[opened.digest][0].changed()

    def _prefetch_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._turn_off(error)

    async def records(
        self, opened: OpenSet, numbers: list[int], damaged: set[int]
    ) -> list[bytes | memoryview | Exception | None]:
        """Return each record, or the error why it cannot be read, or None if it is in the cache now.

        `damaged` are those that a client has found damaged or unreadable in the cache.
        """
        blocks = {number: int(opened.table.block_of[number]) for number in numbers}
        for block in {blocks[number] for number in damaged}:
            if opened.cached and opened.cached.shared.present[block] and not opened.busy[block]:
                await self._change(opened.cached.remove, block)
        present = opened.cached.shared.present if opened.cached else None
        wanted = [each for each in numbers if each in damaged or present is None or not present[blocks[each]]]
        began = time.monotonic()
        arrived = await self._fetcher.demand(opened, {blocks[number] for number in wanted})
        found: dict[int, bytes | memoryview | Exception] = {}
        failed = []
        for number in wanted:
            future = arrived[blocks[number]]
            if future.exception() is None:
                found[number] = _record(opened, number, future.result())
            else:
                failed.append(number)
        if time.monotonic() - began < _QUICK_SECONDS:
            found.update(zip(failed, await self._fetcher.records(opened, failed), strict=True))
        else:
            found.update((number, as_storage_error(arrived[blocks[number]].exception())) for number in failed)
        return [found.get(number) for number in numbers]

    async def _store(self) -> None:
        """Store what arrives, one batch after another, until cancelled."""
        while True:
            batch = [await self._queue.get()]
            while not self._queue.empty() and len(batch) < _AT_ONCE:
                batch.append(self._queue.get_nowait())
            try:
                stored = await self._on_disk(lambda batch: [self._store_one(each) for each in batch], batch)
            except Exception as error:  # of any kind: fetched blocks must not pile up in memory
                self._turn_off(error)
                stored = [False] * len(batch)
            for each, done in zip(batch, stored, strict=True):
                each.stored.set_result(done)

    async def _on_disk(self, work: Callable[..., _Result], *arguments: object) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *arguments)

    async def _change(self, work: Callable[..., _Result], *arguments: object) -> _Result | None:
        """Change the cache on disk. If that fails, turn the cache off."""
        try:
            return await self._on_disk(work, *arguments)
        except OSError as error:
            self._turn_off(error)
            return None

    def _store_one(self, fetched: Fetched) -> bool:
        cached, complete = fetched.opened.cached, True
        for block, content in fetched.blocks:
            if cached is None or self._evictor is None:
                return False
            if not _is_sound(fetched.opened, block, content) or not self._evictor.make_room(cached, block):
                complete = False
                continue
            cached.write(block, content)
            self._stored += 1
        return complete

    def _turn_off(self, error: BaseException) -> None:
        """Stop storing. Clients may still read what the cache holds."""
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
            if Path(each.index_file).parent == self._paths.socket.parent:
                Path(each.index_file).unlink(missing_ok=True)


def _record(opened: OpenSet, number: int, block: memoryview) -> memoryview:
    begin = int(opened.index.offset[number] - opened.table.start[opened.table.block_of[number]])
    return block[begin : begin + int(opened.index.length[number])]


def _is_sound(opened: OpenSet, block: int, content: memoryview) -> bool:
    """Whether all records of a block have their checksum. A damaged one is not stored, and fetched each time."""
    return all(
        crc32(_record(opened, each, content)) == opened.index.checksum[each] for each in opened.table.samples(block)
    )


def _reason(error: BaseException) -> str:
    return (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
