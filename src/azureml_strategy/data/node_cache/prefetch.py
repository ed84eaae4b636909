"""Fetches a set's blocks before they are needed, in the order in which they will be."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from azureml_strategy.data.node_cache.blocks import GAP
from azureml_strategy.data.node_cache.cache_folder import CachedSet, CacheFolder
from azureml_strategy.data.node_cache.fetching import Fetcher, OpenSet
from azureml_strategy.data.node_cache.orders import Timeline

# How much is fetched ahead of the readers where something else has to be evicted for it: what a line of 25 Gbit/s
# brings in 160 ms, but at most 1/32 of the cache, as what waits there keeps other blocks out.
_AHEAD, _SHARE = 512 << 20, 32
# So many bytes that are needed next are planned together: neighbours among them come by one request.
_WINDOW = 8 << 20
# Where the cache has room for all of a pass, a request is widened by neighbours that the pass needs as well, up to this
# length: storage serves few long requests at several times the rate of many short ones.
_AROUND = 512 << 10
# Uses that are examined in one go, and uses that may be fetched in one go.
_LOOK, _MOST = 1 << 16, 4096
_WAIT_SECONDS = 0.02


class Prefetcher:
    """Fetches what a set's ranks will read.

    It goes on beyond `_AHEAD` bytes, and into the next pass, where nothing has to make room for it.

    Args:
        of: the set.
        cached: what the node keeps of it.
        folder: of the cache.
        fetcher: that asks storage.
        read: returns how many samples the processes of each rank have read.
    """

    def __init__(
        self,
        of: OpenSet,
        cached: CachedSet,
        folder: CacheFolder,
        fetcher: Fetcher,
        read: Callable[[], dict[str, int]],
    ) -> None:
        self._of, self._present, self._folder = of, cached.shared.present, folder
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
            if self._of.schedule:
                await self._follow()

    async def _follow(self) -> None:
        """Prefetch a timeline to its end, or until there is another one."""
        read = self._read()
        self._ranks, self._began_at, self._failed_at = max(len(read), 1), self._of.schedule.front(read), -1
        self._waiting.clear()
        self._waiting_bytes = 0
        timeline = await asyncio.to_thread(self._of.schedule.timeline, read)
        needed = self._of.schedule.needed()
        missing = np.flatnonzero(needed & (self._present == 0))
        size = int((self._of.table.end[missing] - self._of.table.start[missing] + 4096).sum())
        around = needed if size < self._folder.free else None
        at = 0
        while not self._changed.is_set():
            # The readers may have overtaken it. Time is counted in samples of a rank since the timeline began.
            now = (self._front() - self._began_at) // self._ranks
            at = max(at, int(np.searchsorted(timeline.times, now)))
            blocks = timeline.blocks[at : at + _LOOK]
            if not len(blocks):
                return
            missing = at + np.flatnonzero((self._present[blocks] == 0) & ~self._of.busy[blocks])
            at = await self._fetch(timeline, missing, around) if len(missing) else at + len(blocks)
            await asyncio.sleep(0)

    def _front(self) -> int:
        return self._of.schedule.front(self._read())

    async def _fetch(self, timeline: Timeline, missing: NDArray[np.int64], around: NDArray[np.bool_] | None) -> int:
        """Fetch the first of the missing places of a timeline; return the place to go on from."""
        table = self._of.table
        places = missing[:_MOST]
        size = np.cumsum(table.end[timeline.blocks[places]] - table.start[timeline.blocks[places]])
        places = places[: 1 + int(np.searchsorted(size, min(_WINDOW, self._ahead // 4)))]
        if not await self._room(int(timeline.times[places[0]]), int(size[len(places) - 1]), around is not None):
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

    async def _room(self, time: int, size: int, fits: bool) -> bool:
        """Wait until so many bytes may be fetched; False if their readers have passed, or the schedule has changed."""
        while not self._changed.is_set():
            front = self._front()
            now = (front - self._began_at) // self._ranks
            while self._waiting and self._waiting[0][0] < now:
                self._waiting_bytes -= self._waiting.popleft()[1]
            if time < now:
                return False
            # After a block that did not fit or failed, nothing is tried before somebody has read something.
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
        await self._fetcher.turn()
        there = (self._present[first : last + 1] != 0) | self._of.busy[first : last + 1]
        missing = first + np.flatnonzero(~there)
        for begin, end in self._of.table.runs(missing) if len(missing) else ():
            if around is not None:
                begin, end = self._widen(begin, end, around)
            size = int(self._of.table.end[end] - self._of.table.start[begin])
            self._waiting.append((time, size))
            self._waiting_bytes += size
            self._under_way_bytes += size
            self._fetcher.begin(self._of, begin, end).add_done_callback(partial(self._ended, size))

    def _widen(self, first: int, last: int, needed: NDArray[np.bool_]) -> tuple[int, int]:
        """Take in the neighbours of a run that are needed too."""
        while self._joins(first, last + 1, last + 1, needed):
            last += 1
        while self._joins(first - 1, last, first - 1, needed):
            first -= 1
        return first, last

    def _joins(self, first: int, last: int, new: int, needed: NDArray[np.bool_]) -> bool:
        table = self._of.table
        if not 0 <= new < len(table) or self._present[new] or self._of.busy[new] or not needed[new]:
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
