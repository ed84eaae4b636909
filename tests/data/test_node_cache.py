"""The cache of a node, with real server processes, ranks and workers."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path
from zlib import crc32

import numpy as np
import psutil
import pytest
from tests.data.open_files import open_below
from tests.data.packed import packed_set

from azureml_strategy.control.process import this_process
from azureml_strategy.data.node_cache import protocol, server
from azureml_strategy.data.node_cache.client import CacheSettings, NodeCache, NodeCacheError
from azureml_strategy.data.node_cache.protocol import Frame, server_paths
from azureml_strategy.data.shard_index import INDEX_NAME, ShardIndex

pytestmark = pytest.mark.usefixtures("meeting_place")
BATCH = 10
LARGE = 64 << 20


@pytest.fixture
def index(tmp_path: Path) -> ShardIndex:
    return packed_set(tmp_path / "set", 240)


def cache_of(tmp_path: Path, limit: int = LARGE, block_bytes: int = 1) -> NodeCache:
    return NodeCache(str(tmp_path / "set"), CacheSettings(tmp_path / "cache", limit, block_bytes))


def is_right(index: ShardIndex, numbers: list[int], records: list[bytes | Exception]) -> bool:
    return [crc32(each) if isinstance(each, bytes) else each for each in records] == index.checksum[numbers].tolist()


def wait_until(condition: Callable[[], bool]) -> None:
    """An event that nothing tells: pytest's own timeout ends what waits in vain."""
    while not condition():
        time.sleep(0.01)


def wait_for_end(pid: int) -> None:
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def orders(samples: int, rank: int, ranks: int, epoch: int) -> np.ndarray:
    return np.random.default_rng(epoch).permutation(samples)[rank::ranks]


def test_without_a_folder_records_come_from_storage(tmp_path: Path, index: ShardIndex) -> None:
    cache = NodeCache(str(tmp_path / "set"), CacheSettings())
    assert cache.index.digest == index.digest
    numbers = [5, 3, 200, 4, 5]
    assert is_right(index, numbers, cache.read(numbers))
    told = cache.statistics()
    # 3, 4 and 5 are neighbours and come by one request, and 5 once.
    assert told["requests"] == 2
    assert cache.read([]) == []
    cache.close()
    wait_for_end(told["pid"])


def test_numbers_beyond_the_set_are_refused(tmp_path: Path, index: ShardIndex) -> None:
    cache = cache_of(tmp_path)
    for number in (-1, len(index)):
        with pytest.raises(IndexError, match="240 samples"):
            cache.read([number])
    cache.close()


def test_each_byte_is_fetched_once_and_the_second_pass_makes_no_request(tmp_path: Path, index: ShardIndex) -> None:
    cache = cache_of(tmp_path)
    for epoch in range(2):
        order = orders(len(index), 0, 1, epoch)
        cache.expect(order, orders(len(index), 0, 1, epoch + 1))
        for at in range(0, len(order), BATCH):
            numbers = order[at : at + BATCH].tolist()
            assert is_right(index, numbers, cache.read(numbers))
            cache.reached(at + BATCH)
        if epoch == 0:
            first = cache.statistics()
            wait_until(lambda: cache.statistics()["stored_blocks"] == len(index))
    told = cache.statistics()
    assert first["fetched_bytes"] <= index.sizes.sum()
    assert (told["requests"], told["fetched_bytes"]) == (first["requests"], first["fetched_bytes"])
    cache.close()
    wait_for_end(told["pid"])
    again = cache_of(tmp_path)  # the next job on the node
    assert is_right(index, list(range(240)), again.read(range(240)))
    assert again.statistics()["requests"] == 0
    again.close()


def test_the_pass_is_prefetched_and_then_the_next_one(tmp_path: Path, index: ShardIndex) -> None:
    cache = cache_of(tmp_path)
    cache.expect(np.arange(100), np.arange(100, 150))
    wait_until(lambda: cache.statistics()["stored_blocks"] == 150)
    told = cache.statistics()
    assert is_right(index, list(range(150)), cache.read(range(150)))
    assert cache.statistics()["fetched_bytes"] == told["fetched_bytes"]
    cache.close()


def test_the_server_loads_no_heavy_library(tmp_path: Path, index: ShardIndex) -> None:
    code = (
        "import azureml_strategy.data.node_cache.server, azureml_strategy.data.node_cache.client, sys;"
        "print([name for name in ('torch', 'lightning', 'pandas', 'obstore', 'azure') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_server_may_open_as_many_files_as_the_system_allows(tmp_path: Path, index: ShardIndex) -> None:
    cache = NodeCache(str(tmp_path / "set"), CacheSettings())
    allowed, most = psutil.Process(cache.statistics()["pid"]).rlimit(psutil.RLIMIT_NOFILE)
    assert allowed == most
    cache.close()


def read_as_rank(cache: NodeCache, index: ShardIndex, rank: int, ranks: int, workers: int, epochs: int) -> None:
    """What a rank does: its workers, which persist, read its batches in turns."""
    context = multiprocessing.get_context("fork")
    for epoch in range(epochs):
        order = orders(len(index), rank, ranks, epoch)
        cache.expect(order, orders(len(index), rank, ranks, epoch + 1))
        batches = [order[at : at + BATCH].tolist() for at in range(0, len(order), BATCH)]
        children: list[BaseProcess] = [
            context.Process(target=read_batches, args=(cache, index, batches[number::workers]))
            for number in range(workers)
        ]
        for child in children:
            child.start()
        if not workers:
            for number, batch in enumerate(batches):
                assert is_right(index, batch, cache.read(batch))
                cache.reached((number + 1) * BATCH)
        for child in children:
            child.join()
            assert child.exitcode == 0
        cache.reached(len(order))


def read_batches(cache: NodeCache, index: ShardIndex, batches: list[list[int]]) -> None:
    for batch in batches:
        assert is_right(index, batch, cache.read(batch))


def run_rank(folder: Path, limit: int, index: ShardIndex, rank: int, ranks: int, workers: int) -> None:
    cache = NodeCache(str(folder / "set"), CacheSettings(folder / "cache", limit, 1))
    read_as_rank(cache, index, rank, ranks, workers, epochs=2)
    cache.close()


@pytest.mark.parametrize(("ranks", "workers", "share"), [(1, 2, 1.2), (2, 0, 0.5), (4, 2, 1.2), (2, 4, 0.5)])
def test_ranks_and_workers_share_one_server(
    tmp_path: Path, index: ShardIndex, ranks: int, workers: int, share: float
) -> None:
    limit = int(share * (index.sizes.sum() + 4096 * len(index)))
    watching = cache_of(tmp_path, limit)
    context = multiprocessing.get_context("spawn" if ranks == 2 else "fork")
    processes = [
        context.Process(target=run_rank, args=(tmp_path, limit, index, rank, ranks, workers)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "cache").rglob("*")) <= limit + 16384
        time.sleep(0.01)
    assert [process.exitcode for process in processes] == [0] * ranks
    told = watching.statistics()
    if share > 1:
        assert told["fetched_bytes"] <= 1.02 * index.sizes.sum()
    else:
        assert told["fetched_bytes"] < 2 * index.sizes.sum()
    watching.close()
    wait_for_end(told["pid"])


def test_a_pickled_one_connects_in_its_own_process(tmp_path: Path, index: ShardIndex) -> None:
    cache = cache_of(tmp_path)
    content = pickle.dumps(cache)
    assert len(content) < 1000
    copy = pickle.loads(content)
    assert is_right(index, [1, 2], copy.read([1, 2]))
    assert copy.statistics()["pid"] == cache.statistics()["pid"]
    copy.close()
    cache.close()


def test_two_sets_share_one_server_and_one_limit(tmp_path: Path, index: ShardIndex) -> None:
    validation_index = packed_set(tmp_path / "val", 50)
    limit = 900_000
    settings = CacheSettings(tmp_path / "cache", limit, 1)
    training, validation = NodeCache(str(tmp_path / "set"), settings), NodeCache(str(tmp_path / "val"), settings)
    assert training.statistics()["pid"] == validation.statistics()["pid"]
    for epoch in range(2):
        order = orders(240, 0, 1, epoch)
        training.expect(order, orders(240, 0, 1, epoch + 1))
        for at in range(0, 240, BATCH):
            numbers = order[at : at + BATCH].tolist()
            assert is_right(index, numbers, training.read(numbers))
            training.reached(at + BATCH)
        assert is_right(validation_index, list(range(50)), validation.read(range(50)))
        told = training.statistics()
        assert told["cache_bytes"] <= limit
    with pytest.warns(RuntimeWarning, match="limit=900000, which stays"):
        other = cache_of(tmp_path, 800_000)
    for each in (training, validation, other):
        each.close()
    wait_for_end(told["pid"])


def test_an_unknown_order_keeps_what_was_read_last(tmp_path: Path, index: ShardIndex) -> None:
    """As a user's own DataLoader reads: without an order, blocks are fetched when they are read."""
    cache = cache_of(tmp_path, limit=800_000)
    for at in range(0, 240, 20):
        cache.read(range(at, at + 20))
        cache.read(range(5))  # often read: they stay
        wait_until(lambda at=at: cache.statistics()["stored_blocks"] >= at + 20)
    told = cache.statistics()
    assert told["evicted_blocks"] > 0
    assert is_right(index, list(range(5)), cache.read(range(5)))
    assert cache.statistics()["requests"] == told["requests"]
    cache.close()


def test_a_set_without_an_index_is_told(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / INDEX_NAME).write_bytes(b"no index")
    with pytest.raises(NodeCacheError, match="cannot be used"):
        cache_of(tmp_path)
    with pytest.raises(NodeCacheError, match="cannot be listed"):
        NodeCache(str(tmp_path / "nowhere"), CacheSettings(tmp_path / "cache", LARGE))
    wait_until(lambda: not server_paths((tmp_path / "cache").resolve()).socket.exists())


def hold(folder: Path, told: object) -> None:
    cache = NodeCache(str(folder / "set"), CacheSettings(folder / "cache", LARGE))
    worker = multiprocessing.get_context("fork").Process(target=idle, args=(cache, told))
    worker.start()
    worker.join()


def idle(cache: NodeCache, told: object) -> None:
    told.put((cache.statistics()["pid"], os.getpid()))  # type: ignore[attr-defined]
    signal.pause()


def test_a_worker_does_not_keep_the_server_of_a_training_that_was_killed(tmp_path: Path, index: ShardIndex) -> None:
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    training = context.Process(target=hold, args=(tmp_path, told))
    training.start()
    server, worker = told.get()
    training.kill()
    training.join()
    wait_for_end(server)
    assert psutil.pid_exists(worker)
    os.kill(worker, signal.SIGKILL)


def test_a_server_that_ends_while_one_connects_is_no_error(
    tmp_path: Path, index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its counters with it, and does not answer any more."""
    gone: list[Path] = []

    def map_counters(path: Path) -> np.ndarray:
        if not gone:
            gone.append(path)
            raise FileNotFoundError(path)
        return protocol.map_counters(path)

    monkeypatch.setattr("azureml_strategy.data.node_cache.client.map_counters", map_counters)
    cache = cache_of(tmp_path)
    assert gone
    assert is_right(index, [3], cache.read([3]))
    cache.close()


def pickled(tmp_path: Path, told: object) -> None:
    cache = cache_of(tmp_path)
    told.put(pickle.dumps(cache))  # type: ignore[attr-defined]
    cache.close()


def test_one_whose_maker_has_ended_belongs_to_who_has_it_now(tmp_path: Path, index: ShardIndex) -> None:
    """The server would end once a second, as nobody seems to be left."""
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    maker = context.Process(target=pickled, args=(tmp_path, told))
    maker.start()
    content = told.get()
    maker.join()
    cache = pickle.loads(content)
    assert cache._owner["pid"] == os.getpid()
    assert is_right(index, [1, 2], cache.read([1, 2]))
    cache.close()


def test_files_go_with_the_one_that_has_opened_them(tmp_path: Path, index: ShardIndex) -> None:
    cache = cache_of(tmp_path)
    cache.expect(np.arange(240), np.arange(0))
    wait_until(lambda: cache.statistics()["stored_blocks"] == 240)
    before = open_below(tmp_path)
    for _ in range(3):
        another = cache_of(tmp_path)
        assert is_right(index, [0, 100, 200], another.read([0, 100, 200]))
        assert open_below(tmp_path) > before
        del another
    assert open_below(tmp_path) == before
    cache.close()


def test_one_that_goes_while_its_set_is_opened_is_no_user_of_it(tmp_path: Path, index: ShardIndex) -> None:
    """Blocks of a set that nobody uses are the first to go."""

    async def users() -> int:
        serving = server.Server(CacheSettings(), server_paths(None))
        gone = server._Client(serving._slots.pop())
        own = asdict(this_process(0, 0))
        asked = {"address": str(tmp_path / "set"), "environ": {}, "known": "", "owner": own, "own": True, "reader": ""}
        await serving._open(gone, Frame(asked, b""))
        (opened,) = serving._manager._sets.values()
        await serving._manager.close()
        return opened.users

    assert asyncio.run(users()) == 0
