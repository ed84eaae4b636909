"""Records out of shards in a folder: verified, after a fork, in other processes, and however they are damaged."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
from tests.data.open_files import open_below
from tests.data.tar_sets import write_set

from azureml_strategy.data import readers
from azureml_strategy.data.readers import FolderReader, choose_cache, find_index, is_packed, join, parse_bytes
from azureml_strategy.data.shard_index import INDEX_NAME, RecordError, ShardIndexError
from azureml_strategy.data.storage import StorageError
from azureml_strategy.network.doctor.disks import Mount

RECORDS = [os.urandom(1000 + number) for number in range(9)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    samples = [(f"{number:04}.jpg", record, number % 2) for number, record in enumerate(RECORDS)]
    write_set(tmp_path / "set", [samples[:4], samples[4:6], samples[6:]], ["a", "b"])
    return tmp_path / "set"


def test_any_records_in_any_order(folder: Path) -> None:
    reader = FolderReader(folder)
    assert reader.read([8, 0, 0, 5]) == [RECORDS[8], RECORDS[0], RECORDS[0], RECORDS[5]]
    assert reader.read([]) == []
    reader.close()
    assert reader.read([3]) == [RECORDS[3]], "it opens its files again"
    reader.close()


def _read(reader: FolderReader, numbers: list[int]) -> list[bytes | Exception]:
    found = reader.read(numbers)
    reader.close()
    return found


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_it_goes_to_other_processes(folder: Path, method: str) -> None:
    reader = FolderReader(folder)
    assert reader.read([0, 4, 8])[0] == RECORDS[0]
    with get_context(method).Pool(2) as pool:
        found = pool.starmap(_read, [(reader, [number]) for number in range(9)])
        pool.close()
        pool.join()
    assert found == [[record] for record in RECORDS]
    assert reader.read([6]) == [RECORDS[6]]
    reader.close()


def test_few_files_stay_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_MOST_OPEN", 2)
    reader = FolderReader(folder)
    for _ in range(3):
        assert reader.read([0, 4, 8, 1]) == [RECORDS[0], RECORDS[4], RECORDS[8], RECORDS[1]]
    assert open_below(folder) == 2
    reader.close()
    assert open_below(folder) == 0


def test_what_is_damaged_is_named_and_the_rest_is_read(folder: Path) -> None:
    reader = FolderReader(folder)
    index = reader.index
    with (folder / "shard-000000.tar").open("r+b") as shard:
        shard.seek(int(index.offset[1]) + 500)
        shard.write(bytes([RECORDS[1][500] ^ 1]))
    os.truncate(folder / "shard-000001.tar", int(index.offset[5]) + 10)
    (folder / "shard-000002.tar").unlink()
    found = reader.read(range(9))
    assert [number for number, each in enumerate(found) if isinstance(each, bytes)] == [0, 2, 3, 4]
    assert all(isinstance(each, RecordError) for each in found if not isinstance(each, bytes))
    assert "shard-000000.tar, byte" in str(found[1])
    assert "checksum" in str(found[1])
    assert "ends after 10 of 1005 bytes" in str(found[5])
    assert "No such file" in str(found[8])
    reader.close()


@pytest.mark.parametrize("gone", [errno.EIO, errno.ENOTCONN, errno.ESTALE])
def test_a_mount_that_is_gone_is_no_damage(folder: Path, gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> bytes:
        raise OSError(gone, os.strerror(gone))

    reader = FolderReader(folder)
    monkeypatch.setattr(os, "pread", fails)
    (error,) = reader.read([5])
    assert isinstance(error, StorageError)
    assert f"shard-000001.tar cannot be read ({os.strerror(gone)})" in str(error)
    reader.close()


def test_a_full_table_of_files_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(24, "Too many open files")

    reader = FolderReader(folder)
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(OSError, match="Too many open files"):
        reader.read([0])


def test_tars_without_an_index_are_indexed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = find_index(folder)
    (folder / INDEX_NAME).unlink()
    assert find_index(folder).offset.tolist() == expected.offset.tolist()
    assert (folder / INDEX_NAME).is_file()
    monkeypatch.setattr(readers, "index_tars", None)
    assert find_index(folder).checksum.tolist() == expected.checksum.tolist()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no such user on this system")
def test_the_index_of_a_mount_that_is_read_only_is_kept_in_the_users_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / INDEX_NAME).unlink()
    (folder / INDEX_NAME).mkdir()  # also root cannot write a file of this name
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = find_index(folder)
    assert len(list((tmp_path / "cache").rglob("*.npz"))) == 1
    monkeypatch.setattr(readers, "index_tars", None)
    assert find_index(folder).digest == made.digest
    assert FolderReader(folder).read([4]) == [RECORDS[4]]


def _relabel(tar: Path) -> None:
    """Exchange the labels 0 and 1, in as many bytes, and one second later."""
    with tarfile.open(tar) as file:
        places = [member.offset_data for member in file if member.name.endswith(".cls")]
    content = bytearray(tar.read_bytes())
    for place in places:
        content[place] ^= 1
    before = tar.stat().st_mtime_ns
    tar.write_bytes(content)
    os.utime(tar, ns=(before, before + 10**9))


def _write_protect(folder: Path) -> None:
    (folder / INDEX_NAME).unlink(missing_ok=True)
    (folder / INDEX_NAME).mkdir()  # also root cannot write a file of this name


@pytest.mark.parametrize("protect", [lambda folder: None, _write_protect], ids=["beside", "in the user's cache"])
def test_a_made_index_is_made_anew_of_tars_that_changed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protect: Callable[[Path], None]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder / INDEX_NAME).unlink()
    protect(folder)
    assert find_index(folder).label.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    _relabel(folder / "shard-000001.tar")
    assert find_index(folder).label.tolist() == [0, 1, 0, 1, 1, 0, 0, 1, 0]
    shutil.copy(folder / "shard-000000.tar", folder / "shard-000003.tar")
    assert FolderReader(folder).read([9, 12]) == [RECORDS[0], RECORDS[3]]
    (folder / "classes.txt").write_text("cat\ndog\n")
    assert find_index(folder).classes == ("cat", "dog")
    (folder / "shard-000000.tar").unlink()
    assert len(FolderReader(folder).index) == 9


def test_a_packed_set_whose_shards_are_others_is_refused(folder: Path) -> None:
    index = FolderReader(folder).index
    again = r"Copy the folder again.*rm .*index.npz"
    shutil.copy(folder / "shard-000000.tar", folder / "shard-000009.tar")
    with pytest.raises(ShardIndexError, match=rf"shard-000009.tar has .* bytes, but .* it is not of the set. {again}"):
        FolderReader(folder)
    os.truncate(folder / "shard-000002.tar", 10)
    with pytest.raises(ShardIndexError, match=rf"shard-000002.tar has 10 bytes, but by index.npz it has .*{again}"):
        FolderReader(folder)
    (folder / "shard-000001.tar").unlink()
    with pytest.raises(ShardIndexError, match=rf"shard-000001.tar is missing, but .*{again}"):
        FolderReader(folder)
    assert len(pickle.loads(pickle.dumps(FolderReader(folder, index))).index) == 9, "what is sent is not compared"


def test_a_folder_without_shards_says_what_to_type(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ShardIndexError, match="azureml-strategy data pack SRC OUT"):
            FolderReader(place)


def test_it_is_small_when_it_is_sent(folder: Path) -> None:
    reader = FolderReader(folder)
    reader.read([0])
    assert len(pickle.dumps(reader)) < 3000
    reader.close()


def test_what_is_packed_and_what_is_not(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "plain" / "a").mkdir(parents=True)
    assert is_packed(str(folder))
    assert is_packed("az://container/set")
    assert not is_packed(str(tmp_path / "plain"))
    (folder / INDEX_NAME).unlink()
    assert is_packed(str(folder)), "tar files that are to be indexed"
    shutil.rmtree(folder)
    assert not is_packed(str(folder))


def test_folders_below_an_address() -> None:
    assert join("az://container/set/", "train") == "az://container/set/train"
    assert join("/data/set", "train") == "/data/set/train"
    assert join(Path("/data/set"), "train") == "/data/set/train"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500GB", 500 * 10**9),
        ("1.5 TB", 1_500 * 10**9),
        ("64MiB", 64 << 20),
        (12, 12),
        ("100m", 10**8),
        ("1_000", 1000),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "1 XB", "half", "1e3GBx", "inf"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no number of bytes\. Write one, as 500GB"):
        parse_bytes(text)


def test_a_cache_is_where_it_is_said_to_be(tmp_path: Path) -> None:
    assert choose_cache(None, "1GB") is None
    chosen = choose_cache(tmp_path / "cache", "1GB")
    assert chosen is not None
    assert (chosen.folder, chosen.limit) == (tmp_path / "cache", 10**9)
    left = choose_cache(tmp_path / "cache", None)
    assert left is not None
    assert 0 < left.limit <= shutil.disk_usage(tmp_path).free
    somewhere = choose_cache("auto", None)
    assert somewhere is not None
    assert somewhere.folder is not None
    assert somewhere.folder.name == "azureml-strategy-cache"


def test_files_go_with_their_reader(folder: Path) -> None:
    """A search for hyperparameters makes a data set for each of its trials."""
    for _ in range(3):
        assert FolderReader(folder).read([0, 4, 8])[0] == RECORDS[0]
    assert open_below(folder) == 0


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """Free bytes of the disks of a node; what caches take on them is not free."""
    free = {tmp_path / name: size for name, size in (("tmp", 10**6), ("a", 100 * 10**6), ("b", 99 * 10**6))}
    for place in free:
        place.mkdir()

    def usage(path: Path) -> SimpleNamespace:
        place = next(each for each in free if path.is_relative_to(each))
        taken = sum(each.stat().st_blocks * 512 for each in place.rglob("*"))
        return SimpleNamespace(free=free[place] - taken)

    mounts = tuple(Mount("/dev/sd", str(place), "ext4", False) for place in free if place.name != "tmp")
    monkeypatch.setattr(readers, "read_mounts", lambda proc: mounts)
    monkeypatch.setattr(readers.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setattr(readers.shutil, "disk_usage", usage)
    return free


@pytest.mark.parametrize("other", [99 * 10**6, 50 * 10**6])
def test_the_next_job_finds_the_cache_on_the_disk_that_it_has_filled(
    disks: dict[Path, int], tmp_path: Path, other: int
) -> None:
    disks[tmp_path / "b"] = other
    first = choose_cache("auto", None)
    assert first is not None
    assert first.folder == tmp_path / "a" / "azureml-strategy-cache"
    first.folder.mkdir()
    (first.folder / "000000").write_bytes(bytes(60 * 10**6))
    assert choose_cache("auto", None) == replace(first, limit=ANY)


def test_what_vanishes_while_it_is_counted_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that another rank has started removes old sets."""
    monkeypatch.setattr(os, "walk", lambda place: [(str(place), [], ["gone"])])
    (tmp_path / "cache").mkdir()
    chosen = choose_cache(tmp_path / "cache", None)
    assert chosen is not None
    assert chosen.limit > 0


def test_a_file_that_one_thread_reads_is_not_closed_by_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what was opened next would be read in its place, and sound records be taken for damaged ones."""
    monkeypatch.setattr(readers, "_MOST_OPEN", 1)
    reader = FolderReader(folder)
    pread = os.pread

    def interrupted(file: int, length: int, offset: int) -> bytes:
        monkeypatch.setattr(os, "pread", pread)
        assert reader.read([4, 8]) == [RECORDS[4], RECORDS[8]]  # as another thread just now
        return pread(file, length, offset)

    monkeypatch.setattr(os, "pread", interrupted)
    assert reader.read([0]) == [RECORDS[0]]
    reader.close()
