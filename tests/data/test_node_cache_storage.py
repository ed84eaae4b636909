"""The cache of a node before Blob Storage: whose rights read, and what a set that was written anew becomes."""

from __future__ import annotations

import io
import os
import pickle
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.data.azurite import Azurite, start_azurite
from tests.data.packed import packed_set
from tests.data.test_node_cache import LARGE, is_right, wait_for_end

from azureml_strategy.data.node_cache.client import CacheSettings, NodeCache, NodeCacheError
from azureml_strategy.data.node_cache.protocol import server_paths
from azureml_strategy.data.shard_index import RecordError
from azureml_strategy.data.storage import StorageError
from azureml_strategy.data.storage.credentials import Variables, storage_variables

pytestmark = pytest.mark.usefixtures("meeting_place")


@pytest.fixture(scope="module")
def other_azurite() -> Iterator[Azurite]:
    """Another account: the same addresses lead to other data."""
    yield from start_azurite()


def use(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in azurite.environment.items():
        monkeypatch.setenv(name, value)


def settings_of(tmp_path: Path, folder: str) -> CacheSettings:
    return CacheSettings(tmp_path / folder if folder else None, LARGE, 1)


@pytest.mark.parametrize("folder", ["cache", ""])
def test_each_client_reads_with_its_own_account(
    tmp_path: Path, azurite: Azurite, other_azurite: Azurite, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    mine, others = packed_set(tmp_path / "mine", 20), packed_set(tmp_path / "others", 30)
    address = azurite.upload(tmp_path / "mine")
    other_azurite.upload(tmp_path / "others", container=address.split("/")[2])
    settings = settings_of(tmp_path, folder)
    use(azurite, monkeypatch)
    first = NodeCache(address, settings)
    use(other_azurite, monkeypatch)
    second = NodeCache(address, settings)
    server = first.statistics()["pid"]
    assert second.statistics()["pid"] == server
    assert is_right(mine, list(range(20)), first.read(range(20)))
    assert is_right(others, list(range(30)), second.read(range(30)))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmcga2V5IG9mIGFub3RoZXIgam9i")
    with pytest.raises(NodeCacheError, match="may not be read") as refused:
        NodeCache(address, settings)
    assert "d3Jvbmcg" not in str(refused.value)
    assert "d3Jvbmcg" not in server_paths(settings.folder).log.read_text()
    first.close()
    second.close()
    wait_for_end(server)


def tar(labels: list[int]) -> bytes:
    """A set of a foreign tar, without an index. The size is the same whatever the labels are."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        for number, label in enumerate(labels):
            for suffix, content in (("jpg", f"image {number}"), ("cls", str(label))):
                info = tarfile.TarInfo(f"{number}.{suffix}")
                info.size = len(content)
                file.addfile(info, io.BytesIO(content.encode()))
    return out.getvalue()


@pytest.mark.parametrize("remote", [True, False])
def test_relabelled_tars_of_the_same_size_are_indexed_anew(
    tmp_path: Path, azurite: Azurite, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    use(azurite, monkeypatch)
    before, after = tar([0, 1, 2]), tar([2, 1, 0])
    (tmp_path / "a.tar").write_bytes(before)
    address = azurite.upload({"a.tar": before}) if remote else str(tmp_path)
    for labels in ([0, 1, 2], [2, 1, 0]):
        cache = NodeCache(address, CacheSettings())
        assert cache.index.label.tolist() == labels
        server = cache.statistics()["pid"]
        cache.close()
        wait_for_end(server)
        (tmp_path / "a.tar").write_bytes(after)
        if remote:
            azurite.replace(f"{address}/a.tar", after)


@pytest.mark.parametrize("folder", ["cache", ""])
def test_a_set_that_was_packed_anew_is_read_anew_by_who_begins(tmp_path: Path, folder: str) -> None:
    before = packed_set(tmp_path / "set", 20)
    settings = settings_of(tmp_path, folder)
    first = NodeCache(str(tmp_path / "set"), settings)
    content = pickle.dumps(first)
    assert is_right(before, [1, 2], first.read([1, 2]))
    after = packed_set(tmp_path / "set", 30)
    second = NodeCache(str(tmp_path / "set"), settings)
    assert second.index.digest == after.digest
    assert is_right(after, list(range(30)), second.read(range(30)))
    assert second.statistics()["pid"] == first.statistics()["pid"]
    # A worker of the first one sees the same set as the first one, and no record of another is taken for one of it.
    worker = pickle.loads(content)
    assert worker.index.digest == first.index.digest == before.digest
    assert all(isinstance(each, (RecordError, StorageError)) for each in worker.read(range(5, 10)))
    server = second.statistics()["pid"]
    os.kill(server, signal.SIGKILL)
    wait_for_end(server)
    (error,) = first.read([3])
    assert "its index has changed. Start again." in str(error)
    assert is_right(after, [3], second.read([3]))
    for each in (first, worker, second):
        each.close()


def test_a_set_that_was_copied_anew_goes_on(tmp_path: Path, azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> None:
    index = packed_set(tmp_path / "set", 20)
    address = azurite.upload(tmp_path / "set")
    use(azurite, monkeypatch)
    first = NodeCache(address, CacheSettings())
    assert is_right(index, list(range(20)), first.read(range(20)))
    for path in (tmp_path / "set").iterdir():
        azurite.replace(f"{address}/{path.name}", path.read_bytes())
    second = NodeCache(address, CacheSettings())
    assert is_right(index, list(range(20)), second.read(range(20)))
    assert is_right(index, list(range(20)), first.read(range(20)))
    first.close()
    second.close()


def test_variables_are_not_shown() -> None:
    found = storage_variables({"AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0", "MSI_SECRET": "c2VjcmV0", "PATH": "/bin"})
    assert found == {"AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0", "MSI_SECRET": "c2VjcmV0"}
    assert f"{found} {found!r} {[found]}".count("c2VjcmV0") == 0
    assert found.mark != Variables({**found, "MSI_SECRET": "b3RoZXI="}).mark
