"""Checks a packed set against its index: the sizes of its shards, and the checksums of its records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from azureml_strategy.data.shard_index import INDEX_NAME, PASSED_OVER, ShardIndex, load_index, passed_over_text
from azureml_strategy.data.tar_index import index_storage

if TYPE_CHECKING:
    from azureml_strategy.data.storage import Storage

# Bytes of neighbouring records that are read at once.
_RANGE = 8 * 2**20
# Ranges that are read at once: storage answers many as fast as one.
_AT_ONCE = 8
# Records that a quick check reads, all over the set.
QUICK = 1000


@dataclass
class SetCheck:
    """What is wrong with a packed set."""

    index: ShardIndex
    indexed: bool  # whether the set has an index of its own; else it was made by reading all of it
    damaged: list[str] = field(default_factory=list)  # what is wrong, each with the name of its shard and record
    records: int = 0  # how many were read


async def open_set(storage: Storage) -> tuple[ShardIndex, bool]:
    """Return the index of a set, and whether it has one of its own; else the index is made of its tars.

    Raises:
        ShardIndexError: it is damaged, or there is neither an index nor shards.
        StorageError: the storage cannot be reached.
    """
    sizes = await storage.list()
    if INDEX_NAME not in sizes:
        return await index_storage(storage), False
    content = await storage.read(INDEX_NAME, 0, sizes[INDEX_NAME])
    return load_index(bytes(content), f"{storage.address}/{INDEX_NAME}"), True


async def check_set(storage: Storage, quick: bool, advance: Callable[[int, int], None]) -> SetCheck:
    """Check a set; if `quick`, only a thousand records, spread over the set.

    `advance` is called with the number of records read since the last call, and that of all records to read.

    Raises:
        ShardIndexError: as of `open_set`.
        StorageError: the storage cannot be reached.
    """
    index, indexed = await open_set(storage)
    check = SetCheck(index, indexed)
    usable = _check_sizes(check, await storage.list())
    numbers = np.arange(len(index))
    if quick:
        numbers = np.unique(np.linspace(0, len(index) - 1, QUICK, dtype=np.int64))
    numbers = numbers[usable[index.shard[numbers]]]
    damaged: dict[int, str] = {}
    async for found, read in _check_records(storage, index, _ranges(index, numbers)):
        damaged |= found
        check.records += read
        advance(read, len(numbers))
    check.damaged += [damaged[number] for number in sorted(damaged)]
    return check


def _check_sizes(check: SetCheck, found: dict[str, int]) -> NDArray[np.bool_]:
    """Compare the sizes of the shards with the index, and return which shards are there in full."""
    usable = np.ones(len(check.index.shards), np.bool_)
    for number, (name, size) in enumerate(zip(check.index.shards, check.index.sizes.tolist(), strict=True)):
        if name not in found:
            check.damaged.append(f"{name} is missing")
            usable[number] = False
        elif found[name] != size:
            check.damaged.append(f"{name} has {found[name]:,} bytes, not {size:,}")
            usable[number] = found[name] > size
    return usable


def _ranges(index: ShardIndex, numbers: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Cut samples into runs that lie close together in one shard."""
    if not len(numbers):
        return
    shard, offset = index.shard[numbers].astype(np.int64), index.offset[numbers]
    # A range ends with its shard, and where 8 MiB from the shard's beginning are full.
    places = shard * (1 + int(index.sizes.max()) // _RANGE) + offset // _RANGE
    yield from np.split(numbers, np.flatnonzero(np.diff(places)) + 1)


async def _check_records(
    storage: Storage, index: ShardIndex, ranges: Iterator[NDArray[np.int64]]
) -> AsyncIterator[tuple[dict[int, str], int]]:
    """Yield for each range, in any order, what is wrong with its records, and how many they are."""
    running: set[asyncio.Task[tuple[dict[int, str], int]]] = set()
    try:
        while True:
            while len(running) < _AT_ONCE and (numbers := next(ranges, None)) is not None:
                running.add(asyncio.create_task(_check_range(storage, index, numbers)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()


async def _check_range(storage: Storage, index: ShardIndex, numbers: NDArray[np.int64]) -> tuple[dict[int, str], int]:
    first, last = int(numbers[0]), int(numbers[-1])
    start, stop = int(index.offset[first]), int(index.offset[last]) + int(index.length[last])
    name = index.shards[int(index.shard[first])]
    try:
        content = memoryview(await storage.read(name, start, stop - start))
    except OSError as error:
        return {number: f"{index.name(number)}: {error}" for number in numbers.tolist()}, len(numbers)
    return await asyncio.to_thread(_damaged, index, numbers, content, start), len(numbers)


def _damaged(index: ShardIndex, numbers: NDArray[np.int64], content: memoryview, start: int) -> dict[int, str]:
    """Return what is wrong with records, by their numbers."""
    found = {}
    for number in numbers.tolist():
        place = int(index.offset[number]) - start
        if crc32(content[place : place + int(index.length[number])]) != index.checksum[number]:
            found[number] = f"{index.name(number)}: its bytes do not have the checksum of the index"
    return found


def describe(index: ShardIndex) -> list[tuple[str, str]]:
    """Say in rows what a set is."""
    total = int(index.length.sum(dtype=np.int64))
    rows = [
        ("kind", index.kind),
        ("samples", f"{len(index):,}"),
        ("shards", f"{len(index.shards):,}, {index.sizes.mean() / 1e6:,.1f} MB on average"),
        ("bytes", f"{int(index.sizes.sum()):,}"),
        ("record", f"{total / len(index) / 1e3:,.1f} kB on average"),
    ]
    if index.classes:
        counts = np.bincount(index.label, minlength=len(index.classes))
        least, most = int(counts.argmin()), int(counts.argmax())
        few, many = f"{counts[least]:,} ({index.classes[least]})", f"{counts[most]:,} ({index.classes[most]})"
        each = f"of {few} to {many} samples" if counts[least] != counts[most] else f"of {counts[least]:,} samples each"
        rows.append(("classes", f"{len(index.classes):,}, {each}"))
    for name, value in index.facts.items():
        if name == PASSED_OVER:
            rows.append(("passed over", passed_over_text(value)))
        else:
            rows.append((name, str(len(value) if isinstance(value, list) else value)))
    return [*rows, ("digest", index.digest)]
