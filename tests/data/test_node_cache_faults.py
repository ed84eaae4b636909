"""What the cache of a node survives: killed servers and clients, damaged files, full and unfit disks, lost records."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import psutil
import pytest
from tests.data.packed import packed_set
from tests.data.test_node_cache import BATCH, LARGE, cache_of, is_right, orders, wait_for_end, wait_until
from tests.faults.disks import why_not

from azureml_strategy.data.node_cache import client, protocol
from azureml_strategy.data.node_cache.cache import double_cache_warning
from azureml_strategy.data.node_cache.cache_folder import shard_file
from azureml_strategy.data.node_cache.client import CacheSettings, NodeCache, NodeCacheError
from azureml_strategy.data.node_cache.protocol import Frame, server_paths
from azureml_strategy.data.shard_index import RecordError, ShardIndex
from azureml_strategy.data.storage import StorageError

pytestmark = pytest.mark.usefixtures("meeting_place")
needs_mount = pytest.mark.skipif(bool(why_not()), reason=why_not() or "mounting works")


@pytest.fixture
def index(tmp_path: Path) -> ShardIndex:
    return packed_set(tmp_path / "set", 240)


def read_pass(cache: NodeCache, index: ShardIndex, kill_after: int = -1) -> None:
    order = orders(len(index), 0, 1, 0)
    cache.expect(order, orders(len(index), 0, 1, 1))
    for at in range(0, len(order), BATCH):
        numbers = order[at : at + BATCH].tolist()
        assert is_right(index, numbers, cache.read(numbers))
        cache.reached(at + BATCH)
        if at == kill_after:
            os.kill(cache.statistics()["pid"], signal.SIGKILL)


def test_a_killed_server_is_started_again(tmp_path: Path, index: ShardIndex) -> None:
    cache = cache_of(tmp_path)
    first = cache.statistics()["pid"]
    read_pass(cache, index, kill_after=100)
    # The new one knows the order, too: it fetches the next pass.
    wait_until(lambda: cache.statistics()["cache_bytes"] > index.length.sum())
    assert cache.statistics()["pid"] != first
    assert is_right(index, list(range(240)), cache.read(range(240)))
    cache.close()


def read_until_killed(cache: NodeCache, index: ShardIndex) -> None:
    while True:
        cache.read(range(240))


def test_a_killed_worker_disturbs_nobody(tmp_path: Path, index: ShardIndex) -> None:
    cache = cache_of(tmp_path, limit=500_000)
    workers = [
        multiprocessing.get_context("fork").Process(target=read_until_killed, args=(cache, index)) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    requests = cache.statistics()["requests"]
    wait_until(lambda: cache.statistics()["requests"] > requests + 100)
    for worker in workers:
        worker.kill()
        worker.join()
    read_pass(cache, index)
    cache.close()


def test_damaged_and_shortened_files_of_the_cache_are_fetched_anew(tmp_path: Path, index: ShardIndex) -> None:
    cache = cache_of(tmp_path)
    cache.expect(np.arange(240), np.arange(0))
    wait_until(lambda: cache.statistics()["stored_blocks"] == 240)
    fetched = cache.statistics()["fetched_bytes"]
    folder = tmp_path / "cache" / index.digest
    with (folder / shard_file(0)).open("r+b") as file:
        file.seek(int(index.offset[7]) + 100)
        file.write(b"\xff\x00\xff\x00\xff")
    os.truncate(folder / shard_file(2), int(index.offset[239]) + 10)
    assert is_right(index, list(range(240)), cache.read(range(240)))
    assert cache.statistics()["fetched_bytes"] - fetched == index.length[7] + index.length[239]
    wait_until(lambda: cache.statistics()["stored_blocks"] == 242)
    assert is_right(index, list(range(240)), cache.read(range(240)))
    assert cache.statistics()["fetched_bytes"] - fetched == index.length[7] + index.length[239]
    cache.close()


@pytest.mark.parametrize("folder", ["cache", ""])
@pytest.mark.parametrize("block_bytes", [1, 64 << 10])
def test_records_that_storage_has_lost_are_told_and_the_rest_is_read(
    tmp_path: Path, index: ShardIndex, folder: str, block_bytes: int
) -> None:
    shard = tmp_path / "set" / index.shards[1]
    os.truncate(shard, int(index.offset[120]) + 5)
    with (tmp_path / "set" / index.shards[0]).open("r+b") as file:
        file.seek(int(index.offset[3]))
        file.write(b"\x00\xff\x00\xff")
    cache = NodeCache(str(tmp_path / "set"), CacheSettings(tmp_path / folder if folder else None, LARGE, block_bytes))
    lost = {3, *range(120, 160)}
    for _ in range(2):
        found = cache.read(range(240))
        assert {
            number for number, record in enumerate(found) if isinstance(record, (RecordError, StorageError))
        } == lost
        kept = sorted(set(range(240)) - lost)
        assert is_right(index, kept, [found[number] for number in kept])
    assert "train-000000.tar, byte" in str(found[3])
    assert "checksum" in str(found[3])
    assert "ends after" in str(found[125])
    cache.close()


def test_a_server_that_stands_still_is_an_error_and_no_hang(tmp_path: Path, index: ShardIndex) -> None:
    cache = NodeCache(str(tmp_path / "set"), CacheSettings())
    server = cache.statistics()["pid"]
    assert cache._link is not None
    cache._link._socket.settimeout(0.5)  # of this connection alone: the next one may take its time
    os.kill(server, signal.SIGSTOP)
    error = cache.read([1])[0]
    assert isinstance(error, NodeCacheError)
    assert "said nothing" in str(error)
    os.kill(server, signal.SIGCONT)
    wait_until(lambda: not isinstance(cache.read([1])[0], NodeCacheError))
    cache.close()


def test_a_server_that_cannot_start_is_told_with_its_own_words(
    tmp_path: Path, index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('this numpy is broken')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(NodeCacheError, match="this numpy is broken"):
        cache_of(tmp_path)


def test_a_server_that_is_killed_again_and_again_is_told(tmp_path: Path, index: ShardIndex) -> None:
    cache = NodeCache(str(tmp_path / "set"), CacheSettings())
    # Whoever opens the lock file finds it locked, and nobody listens: as if each new server died at once.
    server = cache.statistics()["pid"]
    place = server_paths(None)
    os.kill(server, signal.SIGKILL)
    wait_for_end(server)
    place.log.write_text("")
    place.socket.unlink()
    place.lock.unlink()
    place.lock.mkdir()
    error = cache.read([1])[0]
    assert isinstance(error, NodeCacheError)
    assert "IsADirectoryError" in str(error)
    cache.close()


@contextmanager
def mounted(folder: Path, kind: str, options: str) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", kind, "-o", options, kind, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@needs_mount
@pytest.mark.root
@pytest.mark.parametrize("size", ["600k", "16k"])
def test_a_full_disk_turns_the_cache_off_with_one_warning(tmp_path: Path, index: ShardIndex, size: str) -> None:
    with mounted(tmp_path / "cache", "tmpfs", f"size={size}"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = cache_of(tmp_path)
        while not any("cache is off" in str(each.message) for each in caught):
            read_pass(cache, index)  # at first perhaps out of memory: of what is to be stored
        before = cache.statistics()["requests"]
        read_pass(cache, index)
        told = cache.statistics()
        cache.close()
        wait_for_end(told["pid"])
    messages = [str(each.message) for each in caught if "cache is off" in str(each.message)]
    assert len(messages) == 1
    assert "No space left on device" in messages[0]
    assert told["requests"] > before


@needs_mount
@pytest.mark.root
def test_a_file_system_that_cannot_free_parts_of_files_is_no_cache(tmp_path: Path, index: ShardIndex) -> None:
    with mounted(tmp_path / "cache", "ramfs", "mode=700"):
        with pytest.warns(RuntimeWarning, match="cannot free a part of a file"):
            cache = cache_of(tmp_path)
        read_pass(cache, index)
        told = cache.statistics()
        cache.close()
        wait_for_end(told["pid"])
        assert list((tmp_path / "cache").iterdir()) == [tmp_path / "cache" / ".azureml-strategy-cache.lock"]


def test_a_mount_that_caches_too_is_told(tmp_path: Path) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    mounts = tmp_path / "proc" / "self" / "mounts"
    place = tmp_path / "INPUT_images"
    (place / "train").mkdir(parents=True)
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nrslex {place} fuse.rslex ro 0 0\n")
    assert "job.inputs.NAME.access=once" in double_cache_warning(place / "train", {}, tmp_path / "proc")
    off = {"DATASET_MOUNT_BLOCK_FILE_CACHE_ENABLED": "false"}
    assert double_cache_warning(place / "train", off, tmp_path / "proc") == ""
    assert double_cache_warning(tmp_path, {}, tmp_path / "proc") == ""


def start_at_once(folder: Path, told: object, all_told: object) -> None:
    cache = cache_of(folder)
    told.put(cache.statistics()["pid"])  # type: ignore[attr-defined]
    all_told.wait()  # type: ignore[attr-defined]  # a server ends a second after its last client, before a slow one
    cache.close()


def test_of_several_that_start_at_once_one_serves(tmp_path: Path, index: ShardIndex) -> None:
    context = multiprocessing.get_context("fork")
    told, all_told = context.Queue(), context.Event()
    keeping = [context.Process(target=start_at_once, args=(tmp_path, told, all_told)) for _ in range(4)]
    for process in keeping:
        process.start()
    servers = {told.get() for _ in keeping}
    all_told.set()
    for process in keeping:
        process.join()
    assert len(servers) == 1
    wait_for_end(servers.pop())


def test_a_fork_while_another_thread_waits_for_the_server_does_not_hang(
    tmp_path: Path, index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = NodeCache(str(tmp_path / "set"), CacheSettings())
    server = cache.statistics()["pid"]
    reads = threading.Event()

    def receive_from(file: IO[bytes]) -> Frame:
        reads.set()
        return protocol.receive_from(file)

    monkeypatch.setattr(client, "receive_from", receive_from)
    os.kill(server, signal.SIGSTOP)
    found: list[bytes | Exception] = []
    waiting = threading.Thread(target=lambda: found.extend(cache.read([1])))
    waiting.start()
    reads.wait()
    status = Path(f"/proc/self/task/{waiting.native_id}/stat")
    wait_until(lambda: status.read_text().rpartition(")")[2].split()[0] == "S")
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(30)
    code = child.exitcode
    child.kill()
    os.kill(server, signal.SIGCONT)
    waiting.join()
    assert code == 0
    assert is_right(index, [1], found)
    cache.close()


def test_the_answer_to_a_question_that_was_interrupted_is_not_that_of_the_next_one(
    tmp_path: Path, index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = NodeCache(str(tmp_path / "set"), CacheSettings())
    server = cache.statistics()["pid"]

    def interrupted(file: IO[bytes]) -> Frame:
        raise KeyboardInterrupt

    os.kill(server, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(client, "receive_from", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.read([1, 2])
    threading.Timer(0.2, os.kill, (server, signal.SIGCONT)).start()
    assert is_right(index, [100, 101], cache.read([100, 101]))
    cache.close()


def test_many_that_connect_at_once_wait_for_their_turn(tmp_path: Path) -> None:
    """A queue of one place takes two connections, and refuses the third."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(server_paths(None).socket))
        listening.listen(1)
        first = [client._connect(CacheSettings())[0] for _ in range(2)]
        threading.Timer(0.1, listening.accept).start()
        third, _ = client._connect(CacheSettings())
    for each in (*first, third):
        each.close()


def test_a_server_that_ends_leaves_the_index_of_another_one(
    tmp_path: Path, index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache, each job has a server; workers that begin later read the index then."""
    caches = []
    for job in ("one", "two"):
        monkeypatch.setenv("AZUREML_RUN_ID", job)
        caches.append(NodeCache(str(tmp_path / "set"), CacheSettings()))
    first, second = caches
    server = first.statistics()["pid"]
    assert second.statistics()["pid"] != server
    first.close()
    wait_for_end(server)
    worker = pickle.loads(pickle.dumps(second))
    assert is_right(index, [3], worker.read([3]))
    worker.close()
    second.close()


def test_a_server_that_does_not_get_ready_is_an_error_and_goes(
    tmp_path: Path, index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("import time; time.sleep(3600)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(client, "_START_SECONDS", 0.5)
    with pytest.raises(NodeCacheError, match="was not ready"):
        cache_of(tmp_path)
    wait_until(lambda: not any(is_of(each, tmp_path) for each in psutil.process_iter()))


def is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return any(str(folder) in word for word in process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def read_in_vain(folder: Path, number: int, told: object) -> None:
    cache = NodeCache(str(folder / "set"), CacheSettings())
    worker = multiprocessing.get_context("fork").Process(target=cache.read, args=([number],))
    worker.start()
    wait_until(lambda: cache.statistics()["requests"] == 1)
    told.put((cache.statistics()["pid"], worker.pid))  # type: ignore[attr-defined]
    signal.pause()


def test_a_server_whose_mount_hangs_ends_with_its_training(tmp_path: Path, index: ShardIndex) -> None:
    """Else it would keep the place of the cache from all later jobs of the node."""
    shard = tmp_path / "set" / index.shards[1]
    shard.unlink()
    os.mkfifo(shard)  # to open it waits for somebody who writes
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    training = context.Process(target=read_in_vain, args=(tmp_path, 100, told))
    training.start()
    server, worker = told.get()
    training.kill()
    training.join()
    os.kill(worker, signal.SIGKILL)
    wait_for_end(server)
