"""Fetches blocks from storage before they are needed, in the order of their use.

No block is fetched twice at once, neighbours are fetched together, and what a reader waits for comes first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from azureml_strategy.data.node_cache.cache_folder import CachedSet, CacheFolder
from azureml_strategy.data.node_cache.eviction import ReadSchedule, Timeline
from azureml_strategy.data.node_cache.protocol import GAP, BlockTable
from azureml_strategy.data.shard_index import ShardIndex
from azureml_strategy.data.storage import Storage, StorageError

# If so many ranges are being fetched or stored, nothing more is prefetched. At 15 ms a request, 64 of 100 kB fill 3
# Gbit/s; the longer ranges that the prefetch makes of neighbours fill 10 and more.
_UNDER_WAY = 64

# How many bytes are fetched ahead of the readers if other blocks have to be evicted for them: what a line of 25 Gbit/s
# brings in 160 ms, but at most 1/32 of the cache, as blocks that wait there leave less room for others.
_AHEAD, _SHARE = 512 << 20, 32
# So many bytes that are needed next are planned together, so that one request brings neighbours among them.
_WINDOW = 8 << 20
# If the cache has room for all of a pass, a request is widened by neighbours that the pass needs as well, up to this
# length: storage serves few long requests several times as fast as many short ones.
_AROUND = 512 << 10
# Uses that are examined in one go, and uses that may be fetched in one go.
_EXAMINED, _MOST = 1 << 16, 4096
_WAIT_SECONDS = 0.02


@dataclass(eq=False)
class OpenSet:
    """A set that some process reads.

    Attributes:
        index_file: where clients read the index.
        cached: what the node keeps of it; None without a cache.
        arriving: blocks that are being fetched, or were fetched and are not in the cache yet.
        busy: bool `(blocks,)`, whether a block is in `arriving`.
        users: how many connections have it open.
    """

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

    opened: OpenSet
    blocks: list[tuple[int, memoryview]]
    stored: asyncio.Future[bool]


class Fetcher:
    """Asks storage, counts requests and bytes, and puts what was fetched for a cached set into a queue."""

    def __init__(self, store: asyncio.Queue[Fetched]) -> None:
        self._store = store
        self.requests = self.bytes = 0
        self._under_way = 0
        self._less = asyncio.Event()
        self._tasks: set[asyncio.Task[bool]] = set()

    async def wait_for_turn(self) -> None:
        """Wait until few enough ranges are under way to prefetch another one."""
        while self._under_way >= _UNDER_WAY:
            self._less.clear()
            await self._less.wait()

    def begin(self, opened: OpenSet, first: int, last: int) -> asyncio.Task[bool]:
        """Begin to fetch a run of blocks, none of which is arriving yet, and have them stored.

        Whoever waits for one of them gets it, or the error, as soon as it is here. The task's result is whether all of
        them were stored.
        """
        loop = asyncio.get_running_loop()
        futures: dict[int, asyncio.Future[memoryview]] = {}
        for block in range(first, last + 1):
            futures[block] = opened.arriving[block] = loop.create_future()
        opened.busy[first : last + 1] = True
        self._under_way += 1
        task = loop.create_task(self._fetch(opened, first, last, futures))
        self._tasks.add(task)  # the loop itself holds only weak references
        task.add_done_callback(self._tasks.discard)
        return task

    async def _fetch(
        self, opened: OpenSet, first: int, last: int, futures: dict[int, asyncio.Future[memoryview]]
    ) -> bool:
        table = opened.table
        try:
            start = int(table.start[first])
            content = await self.read(opened, int(table.shard[first]), start, int(table.end[last]) - start)
            parts = [
                (block, content[int(table.start[block]) - start : int(table.end[block]) - start]) for block in futures
            ]
            for block, part in parts:
                futures[block].set_result(part)
            if opened.cached is None:
                return False
            fetched = Fetched(opened, parts, asyncio.get_running_loop().create_future())
            self._store.put_nowait(fetched)
            return await fetched.stored
        except Exception as error:  # of any kind: somebody waits for the blocks
            for future in futures.values():
                future.set_exception(error)
                future.exception()  # otherwise asyncio would warn of an error that nobody has read
            return False
        finally:
            self._under_way -= 1
            self._less.set()
            opened.busy[first : last + 1] = False
            for block in futures:
                del opened.arriving[block]

    async def read(self, opened: OpenSet, shard: int, start: int, length: int) -> memoryview:
        """Read a range of a shard.

        Raises:
            StorageError: it cannot be read.
        """
        if not length:
            return memoryview(b"")
        self.requests += 1
        content = await opened.storage.read(opened.index.shards[shard], start, length)
        self.bytes += length
        return memoryview(content).cast("B")

    async def demand(self, opened: OpenSet, blocks: Collection[int]) -> dict[int, asyncio.Future[memoryview]]:
        """Fetch blocks at once, ahead of what is prefetched, and return each one's future when all are done."""
        wanted = {block: opened.arriving[block] for block in blocks if block in opened.arriving}
        missing = np.array(sorted(set(blocks) - wanted.keys()), np.int64)
        if len(missing):
            for first, last in opened.table.runs(missing):
                self.begin(opened, first, last)
            wanted |= {block: opened.arriving[block] for block in missing.tolist()}
        if wanted:
            await asyncio.wait(wanted.values())
        return wanted

    async def records(self, opened: OpenSet, numbers: list[int]) -> list[memoryview | StorageError]:
        """Read records one by one: of a damaged shard, some can still be read."""
        index = opened.index
        places = [(int(index.shard[each]), int(index.offset[each]), int(index.length[each])) for each in numbers]
        found = await asyncio.gather(*(self.read(opened, *place) for place in places), return_exceptions=True)
        return [as_storage_error(each) if isinstance(each, BaseException) else each for each in found]


def as_storage_error(error: BaseException | None) -> StorageError:
    """Return an error of any kind as a `StorageError`."""
    return error if isinstance(error, StorageError) else StorageError(f"{type(error).__name__}: {error}")


class Prefetcher:
    """Fetches what a set's ranks will read.

    It goes beyond `_AHEAD` bytes, and into the next pass, if nothing has to be evicted for that. `read` returns how
    many samples the processes of each rank have read.
    """

    def __init__(
        self,
        opened: OpenSet,
        cached: CachedSet,
        folder: CacheFolder,
        fetcher: Fetcher,
        read: Callable[[], dict[str, int]],
    ) -> None:
        self._opened, self._present, self._folder = opened, cached.shared.present, folder
        self._fetcher, self._read = fetcher, read
        self._ahead = min(_AHEAD, folder.limit // _SHARE)
        self._changed = asyncio.Event()
        # What was prefetched and is not read yet: when it is needed, and its bytes.
        self._waiting: deque[tuple[int, int]] = deque()
        self._waiting_bytes = self._under_way_bytes = 0
        self._ranks, self._began_at, self._failed_at = 1, 0, -1

    def changed(self) -> None:
        """Begin again with the new schedule."""
        self._changed.set()

    async def run(self) -> None:
        """Prefetch until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._opened.schedule:
                await self._follow()

    async def _follow(self) -> None:
        """Prefetch a timeline to its end, or until there is another one."""
        read = self._read()
        self._ranks, self._began_at, self._failed_at = max(len(read), 1), self._opened.schedule.front(read), -1
        self._waiting.clear()
        self._waiting_bytes = 0
        timeline = await asyncio.to_thread(self._opened.schedule.timeline, read)
        needed = self._opened.schedule.needed()
        missing = np.flatnonzero(needed & (self._present == 0))
        size = int((self._opened.table.end[missing] - self._opened.table.start[missing] + 4096).sum())
        around = needed if size < self._folder.free else None
        at = 0
        while not self._changed.is_set():
            # The readers may be ahead by now. Time is counted in samples of a rank since the timeline began.
            now = (self._front() - self._began_at) // self._ranks
            at = max(at, int(np.searchsorted(timeline.times, now)))
            blocks = timeline.blocks[at : at + _EXAMINED]
            if not len(blocks):
                return
            missing = at + np.flatnonzero((self._present[blocks] == 0) & ~self._opened.busy[blocks])
            at = await self._fetch(timeline, missing, around) if len(missing) else at + len(blocks)
            await asyncio.sleep(0)

    def _front(self) -> int:
        return self._opened.schedule.front(self._read())

    async def _fetch(self, timeline: Timeline, missing: NDArray[np.int64], around: NDArray[np.bool_] | None) -> int:
        """Fetch the first of the missing places of a timeline; return the place to go on from."""
        table = self._opened.table
        places = missing[:_MOST]
        size = np.cumsum(table.end[timeline.blocks[places]] - table.start[timeline.blocks[places]])
        places = places[: 1 + int(np.searchsorted(size, min(_WINDOW, self._ahead // 4)))]
        if not await self._wait_for_room(
            int(timeline.times[places[0]]), int(size[len(places) - 1]), around is not None
        ):
            return int(places[0])
        blocks, firsts = np.unique(timeline.blocks[places], return_index=True)
        times = timeline.times[places[firsts]]
        at = 0
        runs: list[tuple[int, int, int]] = []
        for first, last in table.runs(blocks.astype(np.int64)):
            count = last - first + 1
            runs.append((int(times[at : at + count].min()), first, last))
            at += count
        for time, first, last in sorted(runs):
            await self._begin(time, first, last, around)
        return int(places[-1]) + 1

    async def _wait_for_room(self, time: int, size: int, fits: bool) -> bool:
        """Wait until so many bytes may be fetched; False if the readers are past them, or the schedule has changed."""
        while not self._changed.is_set():
            front = self._front()
            now = (front - self._began_at) // self._ranks
            while self._waiting and self._waiting[0][0] < now:
                self._waiting_bytes -= self._waiting.popleft()[1]
            if time < now:
                return False
            # After a block that did not fit, or that failed, nothing is fetched before somebody has read something.
            if front > self._failed_at and (
                fits
                or not self._waiting
                or self._waiting_bytes + size <= self._ahead
                or self._under_way_bytes + size <= self._folder.free
            ):
                return True
            await asyncio.sleep(_WAIT_SECONDS)
        return False

    async def _begin(self, time: int, first: int, last: int, around: NDArray[np.bool_] | None) -> None:
        """Begin to fetch what is still missing of a run."""
        await self._fetcher.wait_for_turn()
        there = (self._present[first : last + 1] != 0) | self._opened.busy[first : last + 1]
        missing = first + np.flatnonzero(~there)
        for begin, end in self._opened.table.runs(missing) if len(missing) else ():
            if around is not None:
                begin, end = self._widen(begin, end, around)
            size = int(self._opened.table.end[end] - self._opened.table.start[begin])
            self._waiting.append((time, size))
            self._waiting_bytes += size
            self._under_way_bytes += size
            self._fetcher.begin(self._opened, begin, end).add_done_callback(partial(self._ended, size))

    def _widen(self, first: int, last: int, needed: NDArray[np.bool_]) -> tuple[int, int]:
        """Extend a run of blocks by the neighbours that are needed too."""
        while self._can_join(first, last + 1, last + 1, needed):
            last += 1
        while self._can_join(first - 1, last, first - 1, needed):
            first -= 1
        return first, last

    def _can_join(self, first: int, last: int, new: int, needed: NDArray[np.bool_]) -> bool:
        table = self._opened.table
        if not 0 <= new < len(table) or self._present[new] or self._opened.busy[new] or not needed[new]:
            return False
        other = new + 1 if new == first else new - 1
        return bool(
            table.shard[new] == table.shard[other]
            and table.end[last] - table.start[first] <= _AROUND
            and table.start[max(new, other)] - table.end[min(new, other)] <= GAP
        )

    def _ended(self, size: int, task: asyncio.Task[bool]) -> None:
        self._under_way_bytes -= size
        if not task.cancelled() and not task.result():
            self._failed_at = self._front()
