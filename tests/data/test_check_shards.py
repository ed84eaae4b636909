"""The check of a packed set: every kind of damage is found and named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.data.packing import class_folders, packed, tar_file

from azureml_strategy.data.packing.check import SetCheck, check_set, describe
from azureml_strategy.data.shard_index import ShardIndexError, load_index
from azureml_strategy.data.storage import open_storage


def check(folder: Path, quick: bool = False) -> tuple[SetCheck, int]:
    told = 0

    def advance(records: int, total: int) -> None:
        nonlocal told
        told += records
        assert told <= total

    async def run() -> SetCheck:
        storage = open_storage(str(folder), {})
        try:
            return await check_set(storage, quick, advance)
        finally:
            await storage.close()

    return asyncio.run(run()), told


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    packed(class_folders(tmp_path / "src", {"cat": 30, "dog": 20}), tmp_path / "out", shard_size=30_000)
    return tmp_path / "out"


def test_a_whole_set(folder: Path) -> None:
    found, told = check(folder)
    assert (found.damaged, found.records, told, found.indexed) == ([], 50, 50, True)
    rows = dict(describe(found.index))
    assert (rows["kind"], rows["samples"]) == ("images", "50")
    assert rows["classes"] == "2, of 20 (dog) to 30 (cat) samples"
    assert rows["digest"] == found.index.digest


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: path.unlink(), "shard-000001.tar is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-10_000]), "shard-000001.tar has "),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "shard-000001.tar has "),
    ],
)
def test_a_shard_of_another_size(folder: Path, damage: Callable[[Path], None], told: str, quick: bool) -> None:
    damage(folder / "shard-000001.tar")
    found, _ = check(folder, quick)
    assert len(found.damaged) == 1
    assert found.damaged[0].startswith(told)


def test_one_bit(folder: Path) -> None:
    index = load_index(folder / "index.npz")
    for number in (3, 40):
        path = folder / index.shards[index.shard[number]]
        content = bytearray(path.read_bytes())
        content[int(index.offset[number]) + 100] ^= 4
        path.write_bytes(content)
    found, told = check(folder)
    expected = [f"{index.name(number)}: its bytes do not have the checksum of the index" for number in (3, 40)]
    assert (found.damaged, told) == (expected, 50)


def test_a_quick_check_reads_some_records(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("azureml_strategy.data.packing.check.QUICK", 7)
    found, told = check(folder, quick=True)
    assert (found.records, told, found.damaged) == (7, 7, [])


def test_records_are_read_by_ranges(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("azureml_strategy.data.packing.check._RANGE", 7_000)
    found, told = check(folder)
    assert (found.records, told, found.damaged) == (50, 50, [])


def test_tars_without_an_index(tmp_path: Path) -> None:
    tar_file(tmp_path / "a.tar", {"a.jpg": b"x", "a.cls": b"1"})
    found, _ = check(tmp_path)
    assert (found.indexed, found.damaged, len(found.index)) == (False, [], 1)


def test_a_damaged_index(folder: Path) -> None:
    (folder / "index.npz").write_bytes(b"text")
    with pytest.raises(ShardIndexError, match=r"out/index.npz cannot be used"):
        check(folder)
