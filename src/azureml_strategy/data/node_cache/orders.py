"""In what order the ranks of a node will read the samples of a set, and when each block is needed next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from azureml_strategy.data.node_cache.blocks import BlockTable

# Later than everything, in samples of a rank.
NEVER = 1 << 40


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
    """In what order all ranks will read one set. Time is counted in samples of a rank: ranks go at the same pace.

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
        """Take note of the order in which a rank will read.

        Args:
            rank: a name that no other rank has.
            this: samples of the pass that begins now.
            following: samples of the next pass.
            slot: of the rank's counters.
            read: samples that its processes have read so far.
        """
        blocks = self._table.of[np.concatenate([this, following])]
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

        Args:
            read: samples that the processes of each rank have read so far. A rank that has just begun is not in it.
        """
        rest = [order.blocks[self._front(order, read.get(rank, 0)) :] for rank, order in list(self._ranks.items())]
        rest.append(np.empty(0, np.int32))  # the last rank may have ended
        times = np.concatenate([np.arange(len(each)) for each in rest])
        order = np.argsort(times, kind="stable")
        return Timeline(np.concatenate(rest)[order], times[order])

    def front(self, read: dict[str, int]) -> int:
        """Return how many samples the ranks have read altogether; it only grows within a pass."""
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
