"""The index of a packed data set: written, read, and refused where it cannot be true."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from azureml_strategy.data.shard_index import INDEX_NAME, ShardIndex, ShardIndexError, load_index


def index(samples: int = 4) -> ShardIndex:
    numbers = np.arange(samples)
    return ShardIndex(
        "images",
        ("a.tar", "b.tar"),
        np.array([10_000, 10_000], np.int64),
        (numbers >= samples // 2).astype(np.uint32),
        (512 + 1024 * (numbers % max(1, samples // 2))).astype(np.int64),
        np.full(samples, 100, np.uint32),
        (numbers % 2).astype(np.int32),
        numbers.astype(np.uint32),
        ("cat", "dög"),
        {"resize": 256},
    )


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    index().save(tmp_path / INDEX_NAME)
    read = load_index(tmp_path / INDEX_NAME)
    assert (read.kind, read.shards, read.classes, read.facts) == (
        "images",
        ("a.tar", "b.tar"),
        ("cat", "dög"),
        {"resize": 256},
    )
    assert read.digest == index().digest == load_index((tmp_path / INDEX_NAME).read_bytes()).digest
    assert read.offset.tolist() == [512, 1536, 512, 1536]
    assert (read.name(3), len(read)) == ("b.tar, byte 1536", 4)
    assert [path.name for path in tmp_path.iterdir()] == [INDEX_NAME]


def test_another_set_has_another_digest() -> None:
    changed = index().checksum.copy()
    changed[2] += 1
    assert len({index().digest, replace(index(), checksum=changed).digest, replace(index(), facts={}).digest}) == 3


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("length", np.full(4, 9_000, np.uint32), "outside of its shard"),
        ("offset", np.array([-1, 1, 2, 3]), "outside of its shard"),
        ("shard", np.array([0, 0, 2, 2], np.uint32), "not there"),
        ("shard", np.array([1, 1, 0, 0], np.uint32), "order"),
        ("label", np.zeros(3, np.int32), "different lengths"),
        ("shards", ("a.tar",), "different lengths"),
    ],
)
def test_an_index_that_cannot_be_true_is_refused(field: str, value: object, reason: str) -> None:
    with pytest.raises(ShardIndexError, match=reason):
        replace(index(), **{field: value})


def test_what_is_no_index_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / INDEX_NAME
    with pytest.raises(ShardIndexError, match=r"There is no .*index.npz. Pack the data set"):
        load_index(path)
    index().save(path)
    content = path.read_bytes()
    for damaged in (b"", b"text", content[: len(content) // 2], content[:-300] + b"\0" * 300):
        path.write_bytes(damaged)
        with pytest.raises(ShardIndexError, match=r"index.npz cannot be used"):
            load_index(path)


def test_a_newer_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("azureml_strategy.data.shard_index._VERSION", 2)
    index().save(tmp_path / INDEX_NAME)
    monkeypatch.undo()
    with pytest.raises(ShardIndexError, match=r"layout 2.*upgrade"):
        load_index(tmp_path / INDEX_NAME)


def test_nothing_is_left_where_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).mkdir()
    with pytest.raises(OSError, match="directory"):
        index().save(tmp_path / INDEX_NAME)
    assert [path.name for path in tmp_path.iterdir()] == [INDEX_NAME]


def test_forked_processes_write_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they make at once has the same address in all of them."""
    made = index()
    scratches: list[str] = []
    rename = Path.replace

    def noted(path: Path, target: Path) -> Path:
        scratches.append(path.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", noted)
    for process in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        made.save(tmp_path / INDEX_NAME)
    assert len(set(scratches)) == 2
