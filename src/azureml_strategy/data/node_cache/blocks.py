"""The blocks of a set: runs of whole records that are fetched, kept and evicted together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from azureml_strategy.data.shard_index import ShardIndex, ShardIndexError

# Bytes between two blocks that are read with them rather than saved: a request costs more. It covers what a tar has
# between records: headers, padding, and a label's own file.
GAP = 8 << 10
# The longest range that a request asks for. Azurite and Azure serve 4 MiB at several times the rate of 100 kB.
RANGE = 4 << 20


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Where the blocks of a set lie.

    Attributes:
        of: int32 `(samples,)`, the block of each sample.
        first: int64 `(blocks + 1,)`, the first sample of each block, and the number of samples.
        shard: int32 `(blocks,)`, the number of the shard that holds a block.
        start: int64 `(blocks,)`, where a block begins in its shard, bytes.
        end: int64 `(blocks,)`, where it ends.
    """

    of: NDArray[np.int32]
    first: NDArray[np.int64]
    shard: NDArray[np.int32]
    start: NDArray[np.int64]
    end: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.shard)

    def samples(self, block: int) -> range:
        """Return the samples of a block."""
        return range(int(self.first[block]), int(self.first[block + 1]))

    def runs(self, blocks: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Join blocks that lie next to one another into ranges for one request each.

        Args:
            blocks: in rising order, none twice.

        Yields:
            The first and the last block of a range; it holds no others than those given.
        """
        apart = (
            (np.diff(blocks) != 1)
            | (self.shard[blocks[1:]] != self.shard[blocks[:-1]])
            | (self.start[blocks[1:]] - self.end[blocks[:-1]] > GAP)
        )
        for run in np.split(blocks, np.flatnonzero(apart) + 1):
            first, last = int(run[0]), int(run[-1])
            for before, block in pairwise(run.tolist()):
                if self.end[block] - self.start[first] > RANGE:
                    yield first, before
                    first = block
            yield first, last


def make_blocks(index: ShardIndex, block_bytes: int) -> BlockTable:
    """Cut a set into blocks: a run of records of a shard, closed as soon as it has `block_bytes`.

    Args:
        index: of the set.
        block_bytes: bytes, from the beginning of the first record to the end of the last.

    Raises:
        ShardIndexError: records overlap, or are not in the order of their places.
    """
    before = np.concatenate([[0], np.cumsum(index.sizes)])[index.shard]
    begin, end = before + index.offset, before + index.offset + index.length
    if bool((begin[1:] < end[:-1]).any()):
        raise ShardIndexError("The index has records that overlap, or that are not in the order of their places.")
    # The record with which a block that begins at each sample would be closed: at the latest the last of the shard.
    last = np.searchsorted(end, begin + block_bytes, "left")
    last_of_shard = np.searchsorted(index.shard, np.arange(len(index.shards)), "right") - 1
    following = (np.minimum(last, last_of_shard[index.shard]) + 1).tolist()
    first, sample, samples = [], 0, len(index)
    while sample < samples:
        first.append(sample)
        sample = following[sample]
    starts = np.array([*first, samples], np.int64)
    counts, ends = np.diff(starts), starts[1:] - 1
    return BlockTable(
        np.repeat(np.arange(len(first), dtype=np.int32), counts),
        starts,
        index.shard[starts[:-1]].astype(np.int32),
        index.offset[starts[:-1]],
        index.offset[ends] + index.length[ends],
    )
