"""Knows in what order the ranks of a node will read a set, and evicts the blocks that are needed last (Belady 1966)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from azureml_strategy.data.node_cache.cache_folder import CachedSet, CacheFolder
from azureml_strategy.data.node_cache.protocol import BlockTable

# Later than everything, in samples of a rank.
NEVER = 1 << 40

# Blocks for 1/64 of the cache are chosen at once, which takes some 100 ms for a million blocks. The choice stays right;
# only blocks that were read meanwhile would be an even better one.
_SHARE = 64


@dataclass(frozen=True, eq=False)
class RankOrder:
    """What one rank reads: this pass, and the next.

    Attributes:
        blocks: int32, the block of each sample, in the order of reading.
        length: samples of this pass; the rest is of the next.
        slot: of the rank's counter of samples that it has handed out in this pass.
        read_before: samples that the rank's processes had read when the pass began.
    """

    blocks: NDArray[np.int32]
    length: int
    slot: int
    read_before: int


@dataclass(frozen=True, eq=False)
class Timeline:
    """All future uses of a set's blocks, by all ranks, sorted by time.

    Attributes:
        blocks: int32, the block of each use.
        times: int64, samples that its rank reads before it.
    """

    blocks: NDArray[np.int32]
    times: NDArray[np.int64]


class ReadSchedule:
    """The order in which all ranks will read one set. Time is counted in samples of a rank: all have the same pace.

    Args:
        table: of the set.
        counters: of all clients: int64 `(slots, 2)`.
    """

    def __init__(self, table: BlockTable, counters: NDArray[np.int64]) -> None:
        self._table, self._counters = table, counters
        self._ranks: dict[str, RankOrder] = {}

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def expect(self, rank: str, this: NDArray[np.int64], following: NDArray[np.int64], slot: int, read: int) -> None:
        """Take note of the samples that a rank will read in this pass and in the next one.

        `slot` is that of its counters, and `read` the number of samples that its processes have read so far.
        """
        blocks = self._table.block_of[np.concatenate([this, following])]
        self._ranks[rank] = RankOrder(blocks, len(this), slot, read)

    def forget(self, rank: str) -> None:
        """Forget the order of a rank that has ended."""
        self._ranks.pop(rank, None)

    def remaining(self) -> int:
        """Return how much of the pass is left, in samples of a rank."""
        return max((order.length - self._reached(order) for order in list(self._ranks.values())), default=0)

    def next_use(self) -> NDArray[np.int64]:
        """Return when each block is needed next: int64 `(blocks,)`, in samples of a rank from now; or `NEVER`.

        Samples that a rank's workers have read but not handed out yet count as needed: they may be read again.
        """
        uses = np.full(len(self._table), NEVER, np.int64)
        for order in list(self._ranks.values()):
            blocks = order.blocks[self._reached(order) :][::-1]
            own = np.full(len(self._table), NEVER, np.int64)
            own[blocks] = np.arange(len(blocks) - 1, -1, -1)  # of several uses, the first is written last
            np.minimum(uses, own, out=uses)
        return uses

    def timeline(self, read: dict[str, int]) -> Timeline:
        """Merge what the ranks have not read yet.

        `read` has the samples that each rank's processes have read so far. A rank that has just begun is not in it.
        """
        rest = [order.blocks[self._front(order, read.get(rank, 0)) :] for rank, order in list(self._ranks.items())]
        rest.append(np.empty(0, np.int32))  # the last rank may have ended
        times = np.concatenate([np.arange(len(each)) for each in rest])
        order = np.argsort(times, kind="stable")
        return Timeline(np.concatenate(rest)[order], times[order])

    def front(self, read: dict[str, int]) -> int:
        """Return how many samples of the pass all ranks together have read. It never falls within a pass."""
        return sum(self._front(order, read.get(rank, 0)) for rank, order in list(self._ranks.items()))

    def needed(self) -> NDArray[np.bool_]:
        """Tell which blocks are needed in this pass: `(blocks,)`."""
        needed = np.zeros(len(self._table), bool)
        for order in list(self._ranks.values()):
            needed[order.blocks[: order.length]] = True
        return needed

    def ranks(self) -> list[str]:
        """Return the ranks that have announced what they will read."""
        return list(self._ranks)

    def _reached(self, order: RankOrder) -> int:
        return min(max(int(self._counters[order.slot, 0]), 0), order.length)

    def _front(self, order: RankOrder, read: int) -> int:
        """Return how far the rank's processes have read: workers read ahead of what is handed out."""
        return min(max(self._reached(order), read - order.read_before, 0), order.length)


class EvictableSet(NamedTuple):
    """What the choice of victims depends on, of a set."""

    cached: CachedSet
    schedule: ReadSchedule
    in_use: bool  # whether any process has it open


class _Victim(NamedTuple):
    cached: CachedSet
    block: int
    next_use: int


class Evictor:
    """Makes room in the cache. One thread uses it.

    A set whose order no rank has announced, or that is not read just now, such as validation during training, counts as
    needed after the current pass. Of blocks that are needed equally late, the least recently read one goes first.
    """

    def __init__(self, folder: CacheFolder, sets: Callable[[], Collection[EvictableSet]]) -> None:
        self._folder, self._sets = folder, sets
        self._victims: deque[_Victim] = deque()
        self._uses: dict[CachedSet, NDArray[np.int64]] = {}
        self._chosen_at = self._offered = 0
        self._changed = False
        self.evicted = 0

    def forget(self) -> None:
        """Choose again at the next call: the schedules have changed. Any thread may call it."""
        self._changed = True

    def make_room(self, cached: CachedSet, block: int) -> bool:
        """Evict what is needed later than a block, until the block fits; False if all else is needed earlier.

        Raises:
            OSError: the disk is broken.
        """
        need = cached.cost(block)
        self._offered += need
        while self._folder.bytes + need > self._folder.limit:
            if self._folder.remove_old():
                continue
            victim = self._last_needed(cached)
            if victim is None or victim.next_use < self._uses[cached][block]:
                return False
            self._evict(victim)
        return True

    def shrink(self) -> None:
        """Evict until the limit holds, of what an earlier job has left.

        Raises:
            OSError: the disk is broken.
        """
        while self._folder.bytes > self._folder.limit:
            if self._folder.remove_old():
                continue
            victim = self._last_needed()
            if victim is None:
                return
            self._evict(victim)

    def _evict(self, victim: _Victim) -> None:
        self._victims.popleft()
        victim.cached.remove(victim.block)
        self.evicted += 1

    def _last_needed(self, known: CachedSet | None = None) -> _Victim | None:
        """Return the block to evict next; it stays the next until it is evicted."""
        share = self._folder.limit // _SHARE
        is_new = known is not None and known not in self._uses
        if not self._victims or is_new or self._offered > share or self._changed:
            self._choose(max(share, 1))
        while self._victims:
            victim = self._victims[0]
            shared = victim.cached.shared
            # A block that was read since it was chosen is not evicted.
            if shared.present[victim.block] and shared.used[victim.block] <= self._chosen_at:
                return victim
            self._victims.popleft()
        return None

    def _choose(self, size: int) -> None:
        """Choose victims of so many bytes, the best first."""
        self._chosen_at, self._offered, self._changed = time.monotonic_ns(), 0, False
        sets = list(self._sets())
        self._uses = dict(zip((each.cached for each in sets), _next_uses(sets), strict=True))
        there = [np.flatnonzero(each.cached.shared.present) for each in sets]
        blocks = np.concatenate([*there, np.empty(0, np.int64)]).astype(np.int64)
        owner = np.repeat(np.arange(len(sets)), [len(each) for each in there])
        uses = np.concatenate([self._uses[each.cached][at] for each, at in zip(sets, there, strict=True)] or [blocks])
        used = np.concatenate([each.cached.shared.used[at] for each, at in zip(sets, there, strict=True)] or [blocks])
        best = _furthest(uses, used, 1 + len(blocks) * size // max(self._folder.bytes, 1))
        self._victims = deque(
            _Victim(sets[number].cached, block, use)
            for number, block, use in zip(owner[best].tolist(), blocks[best].tolist(), uses[best].tolist(), strict=True)
        )


def _next_uses(sets: Collection[EvictableSet]) -> list[NDArray[np.int64]]:
    """Return when the blocks of each set are needed next, in samples of a rank from now."""
    scheduled = [each for each in sets if each.schedule and each.in_use]
    current = max(scheduled, key=lambda each: int(each.cached.shared.used.max()), default=None)
    later = current.schedule.remaining() if current else 0
    found = []
    for each in sets:
        uses = each.schedule.next_use()
        if not each.in_use:
            uses[:] = NEVER
        elif not each.schedule:
            uses[:] = later
        elif each is not current:
            uses += later
        found.append(uses)
    return found


def _furthest(uses: NDArray[np.int64], used: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the places of the blocks that are needed last. Equally late ones are sorted by their last use."""
    if not len(uses):
        return np.empty(0, np.int64)
    span = max(int(used.max() - used.min()), 1)
    key = np.minimum(uses, 1 << 23) + 0.999 * (used.max() - used) / span
    count = min(count, len(key))
    best = np.argpartition(key, len(key) - count)[len(key) - count :]
    return best[np.argsort(key[best])[::-1]]
