"""Folders where others may have been: names in an index stay inside, and no link of theirs is written through."""

from __future__ import annotations

import io
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.packed import packed_set

from azureml_strategy.data.node_cache.cache_folder import MARKER, CacheFolder
from azureml_strategy.data.node_cache.protocol import (
    CacheSettings,
    NodeCacheError,
    make_blocks,
    receive_from,
    server_paths,
)
from azureml_strategy.data.readers import FolderReader, choose_cache
from azureml_strategy.data.shard_index import INDEX_NAME, ShardIndex, ShardIndexError, load_index
from azureml_strategy.files import OutsideError, name_within
from azureml_strategy.network.nccl import log_folder

BYTES = 10_000_000
OUTSIDE = [
    "../shard.tar",
    "/etc/passwd",
    "a/../../b.tar",
    "a//b",
    ".",
    "..",
    "",
    "a\nb",
    "a\0b",
    "\udce9.tar",
    "a" * 300,
]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A file of the user's."""
    (tmp_path / "kept").write_text("mine")
    yield tmp_path / "kept"
    assert (tmp_path / "kept").read_text() == "mine"


@pytest.fixture
def index(tmp_path: Path) -> ShardIndex:
    return packed_set(tmp_path / "set", samples=30, shards=2)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_stays_inside(name: str, index: ShardIndex, tmp_path: Path) -> None:
    with pytest.raises(OutsideError):
        name_within(tmp_path, name)
    with pytest.raises(ShardIndexError, match=r"inside of the folder|too long for a path"):
        replace(index, shards=(name, *index.shards[1:]))
    assert name_within(tmp_path, "a/b") == tmp_path / "a" / "b"


def test_an_index_that_leads_out_is_refused_by_each_reader(index: ShardIndex, tmp_path: Path) -> None:
    content = dict(np.load(tmp_path / "set" / INDEX_NAME))
    header = json.loads(content["header"].tobytes())
    header["shards"][0] = "../" + header["shards"][0]
    content["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(tmp_path / "set" / INDEX_NAME, **content)
    for read in (load_index, lambda path: FolderReader(path.parent)):
        with pytest.raises(ShardIndexError, match=r"is no path of a file inside of the folder of the set"):
            read(tmp_path / "set" / INDEX_NAME)


@pytest.mark.parametrize("name", [f"{MARKER}.lock", f"{MARKER}.probe"])
def test_a_cache_writes_through_no_link_beside_its_sets(name: str, kept: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / name).symlink_to(kept)
    if name.endswith("lock"):
        with pytest.raises(OSError, match="symbolic links"):
            CacheFolder(tmp_path / "cache", BYTES)
    else:
        CacheFolder(tmp_path / "cache", BYTES)


@pytest.mark.parametrize("what", ["link", "open to all", "file"])
def test_a_set_of_somebody_else_is_not_used(what: str, index: ShardIndex, kept: Path, tmp_path: Path) -> None:
    table = make_blocks(index, 1)
    cache = CacheFolder(tmp_path / "cache", BYTES)
    elsewhere, place = tmp_path / "elsewhere", tmp_path / "cache" / "digest"
    if what == "link":
        CacheFolder(tmp_path / "other", BYTES).open_set(index, table, "digest", 1)
        (tmp_path / "other" / "digest").rename(elsewhere)
        (elsewhere / "000000").symlink_to(kept)
        place.symlink_to(elsewhere)
    elif what == "file":
        place.write_text("a file")
    else:
        place.mkdir()
        place.chmod(0o777)
    with pytest.raises(PermissionError, match="is a link, or others may write to it"):
        cache.open_set(index, table, "digest", 1)


def test_a_shard_is_not_opened_through_a_link(index: ShardIndex, kept: Path, tmp_path: Path) -> None:
    table = make_blocks(index, 1)
    cached = CacheFolder(tmp_path / "cache", BYTES).open_set(index, table, "digest", 1)
    (cached.folder / "000000").symlink_to(kept)
    with pytest.raises(OSError, match="symbolic links"):
        cached.write(0, memoryview(bytes(int(table.end[0] - table.start[0]))))


def test_a_predictable_folder_that_is_a_link_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "mine").mkdir()
    for name in ("azureml-strategy-cache", f"azureml-strategy-{os.getuid()}", f"azureml_strategy_nccl_{os.getuid()}"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    monkeypatch.setattr("azureml_strategy.data.readers.read_mounts", lambda _: [])
    chosen = choose_cache("auto", None)
    assert isinstance(chosen, CacheSettings)
    with pytest.raises(NodeCacheError, match="is not a folder that belongs to this user alone"):
        server_paths(None)
    written = log_folder(azure=False)
    assert not written.is_symlink()
    assert written.resolve().parent == tmp_path.resolve()


@pytest.mark.parametrize(
    "message",
    [
        b'{"bytes": 1e99}\n',
        b'{"bytes": 99999999999999}\n',
        b'{"bytes": -1}\n',
        b"[]\n",
        b"\xff\n",
        b"[" * 10_000 + b"\n",
    ],
)
def test_a_message_that_is_none_ends_the_connection(message: bytes) -> None:
    file: Any = io.BufferedReader(io.BytesIO(message))  # type: ignore[arg-type]
    with pytest.raises(ConnectionError):
        receive_from(file)
