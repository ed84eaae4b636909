"""Blocks of a set, and the folder they are kept in: what it takes never exceeds its limit."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.data.packed import packed_set

from azureml_strategy.data.node_cache.cache_folder import MARKER, CachedSet, CacheFolder, shard_file
from azureml_strategy.data.node_cache.eviction import NEVER, EvictableSet, Evictor, ReadSchedule
from azureml_strategy.data.node_cache.protocol import BlockTable, make_blocks
from azureml_strategy.data.shard_index import ShardIndex, ShardIndexError


def closed_one_by_one(index: ShardIndex, block_bytes: int) -> list[list[int]]:
    """The definition, sample by sample."""
    blocks: list[list[int]] = []
    for sample in range(len(index)):
        if blocks and index.shard[blocks[-1][0]] == index.shard[sample]:
            before = blocks[-1]
            if index.offset[before[-1]] + index.length[before[-1]] - index.offset[before[0]] < block_bytes:
                before.append(sample)
                continue
        blocks.append([sample])
    return blocks


@pytest.mark.parametrize("block_bytes", [1, 5_000, 64 << 10, 1 << 30])
def test_a_block_is_closed_as_soon_as_it_is_large_enough(tmp_path: Path, block_bytes: int) -> None:
    index = packed_set(tmp_path, samples=100)
    table, expected = make_blocks(index, block_bytes), closed_one_by_one(index, block_bytes)
    assert [list(table.samples(block)) for block in range(len(table))] == expected
    assert table.block_of.tolist() == [block for block, samples in enumerate(expected) for _ in samples]
    assert table.start.tolist() == [index.offset[samples[0]] for samples in expected]
    assert table.end.tolist() == [index.offset[samples[-1]] + index.length[samples[-1]] for samples in expected]


def test_records_that_overlap_are_refused(tmp_path: Path) -> None:
    index = packed_set(tmp_path, samples=10, shards=1)
    index.offset[3] = index.offset[2]
    with pytest.raises(ShardIndexError, match="overlap"):
        make_blocks(index, 1)


def test_neighbours_are_asked_for_together(tmp_path: Path) -> None:
    table = make_blocks(packed_set(tmp_path, samples=30, shards=3), 1)
    assert list(table.runs(np.array([0, 1, 2, 5, 9, 10, 11]))) == [(0, 2), (5, 5), (9, 9), (10, 11)]


def disk_usage(folder: Path) -> int:
    output = subprocess.run(["du", "-s", "--block-size=1", str(folder)], capture_output=True, text=True, check=True)
    return int(output.stdout.split()[0])


def content(table: BlockTable, block: int) -> memoryview:
    return memoryview(random.Random(int(block)).randbytes(int(table.end[block] - table.start[block])))


def stored(cached: CachedSet, table: BlockTable, block: int) -> bytes:
    shard = (cached.folder / shard_file(int(table.shard[block]))).read_bytes()
    return shard[int(table.start[block]) : int(table.end[block])]


@pytest.mark.parametrize(("block_bytes", "sizes"), [(1, (100, 700)), (1, (3_000, 30_000)), (20_000, (500, 9_000))])
def test_the_limit_holds_at_every_step(tmp_path: Path, block_bytes: int, sizes: tuple[int, int]) -> None:
    """Blocks come and go at random, and a reader finds each that is said to be there as it was written."""
    index = packed_set(tmp_path / "set", 120, sizes=sizes)
    table = make_blocks(index, block_bytes)
    limit = 60_000 + int((table.end - table.start).sum()) // 3
    folder = CacheFolder(tmp_path / "cache", limit)
    cached = folder.open_set(index, table, "a", block_bytes)
    evictor = Evictor(folder, lambda: [EvictableSet(cached, ReadSchedule(table, np.zeros((1, 2), np.int64)), True)])
    chance = random.Random(len(table))
    largest = max(cached.cost(block) for block in range(len(table)))
    for step in range(400):
        block = chance.randrange(len(table))
        if cached.shared.present[block] and chance.random() < 0.3:
            cached.remove(block)
        elif not cached.shared.present[block] and evictor.make_room(cached, block):
            cached.write(block, content(table, block))
            cached.shared.used[block] = step
        if step % 10 == 0:
            assert disk_usage(tmp_path / "cache") <= limit + largest
            assert folder.bytes == disk_usage(tmp_path / "cache")
    there = np.flatnonzero(cached.shared.present)
    assert len(there)
    assert all(stored(cached, table, block) == content(table, block) for block in there)
    for block in there:
        cached.remove(block)
    assert sum(path.stat().st_blocks for path in (tmp_path / "cache" / "a").glob("0*")) == 0


def cache_of(folder: Path, index: ShardIndex, digest: str = "", limit: int = 1 << 30) -> tuple[CacheFolder, CachedSet]:
    cache = CacheFolder(folder, limit)
    return cache, cache.open_set(index, make_blocks(index, 1), digest or index.digest, 1)


def release(cache: CacheFolder) -> None:
    """As when the server ends."""
    os.close(cache._lock)
    cache.sets.clear()


def test_what_is_there_is_used_again_by_the_next_job(tmp_path: Path) -> None:
    index = packed_set(tmp_path / "set", 10)
    first, cached = cache_of(tmp_path / "cache", index)
    cached.write(4, content(make_blocks(index, 1), 4))
    taken = first.bytes
    release(first)
    again, cached = cache_of(tmp_path / "cache", index)
    assert np.flatnonzero(cached.shared.present).tolist() == [4]
    assert stored(cached, make_blocks(index, 1), 4) == content(make_blocks(index, 1), 4)
    assert again.bytes == taken
    release(again)


def test_blocks_of_another_size_begin_anew(tmp_path: Path) -> None:
    index = packed_set(tmp_path / "set", 10)
    first, cached = cache_of(tmp_path / "cache", index)
    cached.write(4, content(make_blocks(index, 1), 4))
    release(first)
    again = CacheFolder(tmp_path / "cache", 1 << 30)
    assert not again.open_set(index, make_blocks(index, 20_000), index.digest, 20_000).shared.present.any()
    release(again)


def test_old_sets_go_first_and_a_users_own_files_stay(tmp_path: Path) -> None:
    index = packed_set(tmp_path / "set", 10)
    for age, digest in enumerate(("older", "newer")):
        cache, cached = cache_of(tmp_path / "cache", index, digest)
        for block in range(10):
            cached.write(block, content(make_blocks(index, 1), block))
        release(cache)
        os.utime(tmp_path / "cache" / digest, (1000 + age, 1000 + age))
    (tmp_path / "cache" / "mine").mkdir()
    (tmp_path / "cache" / "mine" / "thesis.txt").write_text("mine")
    both = disk_usage(tmp_path / "cache")
    cache, cached = cache_of(tmp_path / "cache", index, "now", limit=both - 4096)
    table = make_blocks(index, 1)
    evictor = Evictor(cache, lambda: [EvictableSet(cached, ReadSchedule(table, np.zeros((1, 2), np.int64)), True)])
    assert evictor.make_room(cached, 0)
    names = {path.parent.name for path in (tmp_path / "cache").glob(f"*/{MARKER}")}
    assert names == {"newer", "now"}
    assert (tmp_path / "cache" / "mine" / "thesis.txt").read_text() == "mine"
    release(cache)


def test_a_second_server_does_not_share_the_folder(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path / "cache", 1 << 20)
    with pytest.raises(OSError, match="another user"):
        CacheFolder(tmp_path / "cache", 1 << 20)
    release(cache)


def test_the_next_use_is_that_of_the_first_rank(tmp_path: Path) -> None:
    table = make_blocks(packed_set(tmp_path, 6, shards=1), 1)
    counters = np.zeros((2, 2), np.int64)
    orders = ReadSchedule(table, counters)
    assert (orders.next_use() == NEVER).all()
    orders.expect("a", np.array([0, 1, 2]), np.array([3, 1, 0]), slot=0, read=0)
    orders.expect("b", np.array([3, 4]), np.array([0]), slot=1, read=10)
    assert orders.next_use().tolist() == [0, 1, 2, 0, 1, NEVER]
    counters[:, 0] = 2, 1
    assert orders.next_use().tolist() == [1, 2, 0, 1, 0, NEVER]
    assert orders.remaining() == 1
    line = orders.timeline({"a": 3, "b": 11})  # workers have read further than what was handed out
    assert list(zip(line.blocks.tolist(), line.times.tolist(), strict=True)) == [(3, 0), (4, 0), (1, 1), (0, 1), (0, 2)]


def test_blocks_of_validation_stay_while_those_of_training_are_needed_later(tmp_path: Path) -> None:
    """The order of validation is unknown: it comes after the pass, before what the next pass needs."""
    index = packed_set(tmp_path / "set", 40, sizes=(4096, 4096))
    table = make_blocks(index, 1)
    cache = CacheFolder(tmp_path / "cache", 1 << 30)
    training, validation = (cache.open_set(index, table, name, 1) for name in ("training", "validation"))
    for block in range(10):
        training.write(block, content(table, block))
        validation.write(block, content(table, block))
    training.shared.used[3] = 5
    orders = ReadSchedule(table, np.zeros((1, 2), np.int64))
    orders.expect("a", np.array([3, 4, 5, 20, 21]), np.array([5, 20, 21, 4, 3, 6]), slot=0, read=0)
    cache.limit = cache.bytes
    sets = [EvictableSet(training, orders, True), EvictableSet(validation, ReadSchedule(table, orders._counters), True)]
    evictor = Evictor(cache, lambda: sets)
    assert evictor.make_room(training, 20)
    # What training does not need any more goes first, then what it needs after validation: none of what comes before.
    assert validation.shared.present.sum() == 10
    assert training.shared.present[[3, 4, 5]].all()
    release(cache)


def test_an_empty_folder_of_a_killed_server_is_used(tmp_path: Path) -> None:
    index = packed_set(tmp_path / "set", 10)
    (tmp_path / "cache" / index.digest).mkdir(parents=True)
    cache, cached = cache_of(tmp_path / "cache", index)
    assert not cached.shared.present.any()
    release(cache)
