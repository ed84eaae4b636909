"""What a later job makes of the cache that an earlier one has left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from tests.data.azurite import Azurite
from tests.data.packed import packed_set
from tests.data.test_node_cache import LARGE, cache_of, is_right, wait_for_end, wait_until
from tests.data.test_node_cache_storage import tar

from azureml_strategy.data.node_cache.client import CacheSettings, NodeCache
from azureml_strategy.data.shard_index import ShardIndex

pytestmark = pytest.mark.usefixtures("meeting_place")


@pytest.fixture
def index(tmp_path: Path) -> ShardIndex:
    return packed_set(tmp_path / "set", 240)


def fill(tmp_path: Path, index: ShardIndex, limit: int = LARGE) -> None:
    """What a job does: it reads all, and ends."""
    cache = cache_of(tmp_path, limit)
    assert is_right(index, list(range(240)), cache.read(range(240)))
    if limit == LARGE:
        wait_until(lambda: cache.statistics()["stored_blocks"] == 240)
    server = cache.statistics()["pid"]
    cache.close()
    wait_for_end(server)


def taken(tmp_path: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")])


def test_a_lower_limit_holds_when_the_set_is_opened(tmp_path: Path, index: ShardIndex) -> None:
    fill(tmp_path, index)
    limit = taken(tmp_path) // 3
    cache = cache_of(tmp_path, limit)
    assert limit // 2 < taken(tmp_path) <= limit
    assert cache.statistics()["cache_bytes"] == taken(tmp_path)
    assert is_right(index, list(range(240)), cache.read(range(240)))
    assert cache.statistics()["fetched_bytes"] < 0.9 * index.sizes.sum()
    cache.close()


def test_times_of_use_before_a_reboot_keep_no_block(tmp_path: Path, index: ShardIndex) -> None:
    limit = 900_000
    fill(tmp_path, index, limit)
    used = np.memmap(tmp_path / "cache" / index.digest / "used", np.int64, "r+")
    used[:] = time.monotonic_ns() + 10**15  # the machine had run for days
    cache = cache_of(tmp_path, limit)
    assert used.max() <= time.monotonic_ns()
    present = np.memmap(tmp_path / "cache" / index.digest / "present", np.uint8, "r")
    absent = np.flatnonzero(present == 0).tolist()
    assert is_right(index, absent, cache.read(absent))
    wait_until(lambda: cache.statistics()["evicted_blocks"] > 0)
    cache.close()


@pytest.mark.parametrize("name", ["index.npz", "present", "used", ".azureml-strategy-cache"])
@pytest.mark.parametrize("share", [0.0, 0.7])
def test_what_a_power_cut_has_shortened_is_made_anew(
    tmp_path: Path, index: ShardIndex, name: str, share: float
) -> None:
    fill(tmp_path, index)
    path = tmp_path / "cache" / index.digest / name
    os.truncate(path, int(share * path.stat().st_size))
    cache = cache_of(tmp_path)
    assert is_right(index, list(range(240)), cache.read(range(240)))
    assert cache.statistics()["fetched_bytes"] > 0
    wait_until(lambda: cache.statistics()["stored_blocks"] == 240)
    assert cache.statistics()["cache_bytes"] == taken(tmp_path)
    cache.close()


def test_a_damaged_index_in_the_cache_is_not_believed(tmp_path: Path, index: ShardIndex) -> None:
    fill(tmp_path, index)
    path = tmp_path / "cache" / index.digest / "index.npz"
    content = path.read_bytes()
    for at in range(0, len(content), len(content) // 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        cache = cache_of(tmp_path)
        assert cache.index.digest == index.digest
        server = cache.statistics()["pid"]
        cache.close()
        wait_for_end(server)


def test_a_made_index_that_a_power_cut_has_shortened_is_made_anew(
    meeting_place: Path, azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in azurite.environment.items():
        monkeypatch.setenv(name, value)
    address = azurite.upload({"a.tar": tar([2, 0, 1])})
    for _ in range(2):
        cache = NodeCache(address, CacheSettings())
        assert cache.index.label.tolist() == [2, 0, 1]
        server = cache.statistics()["pid"]
        cache.close()
        wait_for_end(server)
        (kept,) = meeting_place.rglob("*.npz")
        os.truncate(kept, 0)
