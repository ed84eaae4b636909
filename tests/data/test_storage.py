"""Shards in a folder of this node; which addresses are elsewhere."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from azureml_strategy.data.storage import FolderStorage, StorageError, is_remote, open_storage


@pytest.mark.parametrize(
    ("address", "remote"),
    [
        ("az://container/path", True),
        ("AZ://container/path", True),
        ("https://account.blob.core.windows.net/container", True),
        ("abfss://container@account.dfs.core.windows.net/path", True),
        ("azureml://datastores/name/paths/path", True),
        ("azureml:imagenet:3", True),
        ("/data/imagenet", False),
        ("data/azureml", False),
        ("azureml-data/x", False),
        ("~/data", False),
    ],
)
def test_what_is_remote(address: str, remote: bool) -> None:
    assert is_remote(address) == remote


def test_a_folder_is_listed_and_read(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "c.tar").write_bytes(b"c")
    (tmp_path / "a.tar").write_bytes(bytes(range(200)))
    (tmp_path / "b.tar").write_bytes(b"")

    async def use() -> None:
        storage = open_storage(str(tmp_path), {})
        assert isinstance(storage, FolderStorage)
        assert storage.address == str(tmp_path)
        assert await storage.list() == {"a.tar": 200, "b.tar": 0}
        versions = await storage.versions()
        (tmp_path / "b.tar").write_bytes(b"")
        os.utime(tmp_path / "b.tar", (1, 1))
        assert {name for name, version in (await storage.versions()).items() if version != versions[name]} == {"b.tar"}
        assert await storage.place() == str(tmp_path.resolve())
        parts = await asyncio.gather(*(storage.read("a.tar", start, 10) for start in range(0, 200, 10)))
        assert b"".join(parts) == bytes(range(200))
        assert await storage.read("a.tar", 200, 0) == b""
        await storage.close()

    asyncio.run(use())


@pytest.mark.parametrize(
    ("name", "start", "length", "message"),
    [
        ("a.tar", 3, 8, r"a.tar ends after 10 bytes; 8 from byte 3 on were asked for.*copy it again"),
        ("a.tar", 30, 8, "a.tar ends after"),
        ("none.tar", 0, 1, "none.tar cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, start: int, length: int, message: str) -> None:
    (tmp_path / "a.tar").write_bytes(b"0123456789")
    with pytest.raises(StorageError, match=message):
        asyncio.run(FolderStorage(str(tmp_path)).read(name, start, length))


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(
        StorageError, match=r"cannot be listed: No such file or directory. Name the folder of the shards"
    ):
        asyncio.run(FolderStorage(str(tmp_path / "none")).list())
    with pytest.raises(StorageError, match="holds no files"):
        asyncio.run(FolderStorage(str(tmp_path)).list())
