"""Fetches blocks from storage: no block twice at once, neighbours together, and first what a reader waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from azureml_strategy.data.node_cache.blocks import BlockTable
from azureml_strategy.data.node_cache.cache_folder import CachedSet
from azureml_strategy.data.node_cache.orders import ReadSchedule
from azureml_strategy.data.shard_index import ShardIndex
from azureml_strategy.data.storage import Storage, StorageError

# If so many ranges are being fetched or stored, nothing more is prefetched. At 15 ms a request, 64 of 100 kB fill 3
# Gbit/s; the longer ranges that the prefetch makes of neighbours fill 10 and more.
_UNDER_WAY = 64


@dataclass(eq=False)
class OpenSet:
    """A set that some process reads.

    Attributes:
        address: the folder of its shards.
        storage: that holds it.
        index: of the set.
        digest: of the index.
        table: its blocks.
        index_file: where clients read the index.
        schedule: when its blocks will be read.
        cached: what the node keeps of it; None without a cache.
        arriving: blocks that are being fetched, or were fetched and are not in the cache yet.
        busy: bool `(blocks,)`, whether a block is in `arriving`.
        users: connections that have it open.
    """

    address: str
    storage: Storage
    index: ShardIndex
    digest: str
    table: BlockTable
    index_file: str
    schedule: ReadSchedule
    cached: CachedSet | None = None
    arriving: dict[int, asyncio.Future[memoryview]] = field(default_factory=dict)
    users: int = 0

    def __post_init__(self) -> None:
        self.busy: NDArray[np.bool_] = np.zeros(len(self.table), bool)


@dataclass(eq=False)
class Fetched:
    """Blocks that one request has brought."""

    of: OpenSet
    blocks: list[tuple[int, memoryview]]
    stored: asyncio.Future[bool]


class Fetcher:
    """Asks storage, and counts.

    Args:
        store: takes what was fetched for a set that is cached.

    Attributes:
        requests: made so far.
        bytes: fetched so far.
    """

    def __init__(self, store: asyncio.Queue[Fetched]) -> None:
        self._store = store
        self.requests = self.bytes = 0
        self._under_way = 0
        self._less = asyncio.Event()
        self._tasks: set[asyncio.Task[bool]] = set()

    async def turn(self) -> None:
        """Wait until few enough ranges are under way to prefetch another one."""
        while self._under_way >= _UNDER_WAY:
            self._less.clear()
            await self._less.wait()

    def begin(self, of: OpenSet, first: int, last: int) -> asyncio.Task[bool]:
        """Begin to fetch a run of blocks, none of which is arriving yet, and have them stored.

        Whoever waits for one of them gets it as soon as it is here; a failure too.

        Returns:
            whether all of it was stored, once it was.
        """
        loop = asyncio.get_running_loop()
        futures: dict[int, asyncio.Future[memoryview]] = {}
        for block in range(first, last + 1):
            futures[block] = of.arriving[block] = loop.create_future()
        of.busy[first : last + 1] = True
        self._under_way += 1
        task = loop.create_task(self._fetch(of, first, last, futures))
        self._tasks.add(task)  # the loop itself holds only weak references
        task.add_done_callback(self._tasks.discard)
        return task

    async def _fetch(self, of: OpenSet, first: int, last: int, futures: dict[int, asyncio.Future[memoryview]]) -> bool:
        table = of.table
        try:
            start = int(table.start[first])
            content = await self.read(of, int(table.shard[first]), start, int(table.end[last]) - start)
            parts = [
                (block, content[int(table.start[block]) - start : int(table.end[block]) - start]) for block in futures
            ]
            for block, part in parts:
                futures[block].set_result(part)
            if of.cached is None:
                return False
            fetched = Fetched(of, parts, asyncio.get_running_loop().create_future())
            self._store.put_nowait(fetched)
            return await fetched.stored
        except Exception as error:  # of any kind: somebody waits for it
            for future in futures.values():
                future.set_exception(error)
                future.exception()  # or asyncio would warn of an error that nobody asked for
            return False
        finally:
            self._under_way -= 1
            self._less.set()
            of.busy[first : last + 1] = False
            for block in futures:
                del of.arriving[block]

    async def read(self, of: OpenSet, shard: int, start: int, length: int) -> memoryview:
        """Read a range of a shard.

        Raises:
            StorageError: it cannot be had.
        """
        if not length:
            return memoryview(b"")
        self.requests += 1
        content = await of.storage.read(of.index.shards[shard], start, length)
        self.bytes += length
        return memoryview(content).cast("B")

    async def demand(self, of: OpenSet, blocks: Collection[int]) -> dict[int, asyncio.Future[memoryview]]:
        """Have blocks fetched at once, ahead of what is prefetched.

        Returns:
            what becomes of each, as soon as all are here.
        """
        wanted = {block: of.arriving[block] for block in blocks if block in of.arriving}
        missing = np.array(sorted(set(blocks) - wanted.keys()), np.int64)
        if len(missing):
            for first, last in of.table.runs(missing):
                self.begin(of, first, last)
            wanted |= {block: of.arriving[block] for block in missing.tolist()}
        if wanted:
            await asyncio.wait(wanted.values())
        return wanted

    async def records(self, of: OpenSet, numbers: list[int]) -> list[memoryview | StorageError]:
        """Read records one by one: of a damaged shard, those that can be had."""
        index = of.index
        places = [(int(index.shard[each]), int(index.offset[each]), int(index.length[each])) for each in numbers]
        found = await asyncio.gather(*(self.read(of, *place) for place in places), return_exceptions=True)
        return [as_storage_error(each) if isinstance(each, BaseException) else each for each in found]


def as_storage_error(error: BaseException | None) -> StorageError:
    """Return an error of any kind as a `StorageError`."""
    return error if isinstance(error, StorageError) else StorageError(f"{type(error).__name__}: {error}")
