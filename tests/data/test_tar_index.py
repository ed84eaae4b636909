"""The index of tars that something else has packed."""

from __future__ import annotations

import asyncio
import gzip
import io
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import webdataset
from tests.data.packing import class_folders, jpeg, packed, records, tar_file

from azureml_strategy.data.shard_index import ShardIndex, ShardIndexError, load_index
from azureml_strategy.data.storage import FolderStorage, open_storage
from azureml_strategy.data.tar_index import index_shard, index_storage, index_tars, split_of

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def entries(count: int, folder: str = "") -> dict[str, bytes]:
    return {
        f"{folder}{number:05}.{suffix}": content
        for number in range(count)
        for suffix, content in (("jpg", jpeg(number)), ("cls", f"{number % 3}\n".encode()))
    }


@pytest.mark.parametrize("kind", FORMATS)
def test_headers_of_every_kind(tmp_path: Path, kind: str) -> None:
    """Names of 120 and, where the format has such, of 300 bytes, and one that is not ASCII."""
    long = f"{'d' * 60}/{'e' * 50}/" if kind == "ustar" else f"{'d' * 150}/{'é' * 70}/"
    tar_file(tmp_path / "a.tar", entries(4) | entries(3, long), FORMATS[kind])
    index = index_tars(tmp_path)
    assert records(tmp_path, index) == [*map(jpeg, range(4)), *map(jpeg, range(3))]
    assert index.label.tolist() == [0, 1, 2, 0, 0, 1, 2]
    assert (index.kind, index.classes) == ("images", ("0", "1", "2"))


def test_what_webdataset_writes(tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as tar:
        for number in range(5):
            tar.write({"__key__": f"x{number}", "png": jpeg(number, kind="PNG"), "cls": number, "json": {"a": 1}})
    index = index_tars(tmp_path)
    assert records(tmp_path, index) == [jpeg(number, kind="PNG") for number in range(5)]
    assert index.label.tolist() == [0, 1, 2, 3, 4]


def test_labels_from_json_and_names_from_classes_txt(tmp_path: Path) -> None:
    described = {"a.jpg": jpeg(0), "a.json": b'{"label": "dog"}', "b.jpg": jpeg(1), "b.json": b'{"cls": 0, "x": []}'}
    tar_file(tmp_path / "a.tar", described)
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    index = index_tars(tmp_path)
    assert (index.label.tolist(), index.classes) == ([1, 0], ("cat", "dog"))


def test_the_index_of_our_own_shards_is_the_one_that_was_written(tmp_path: Path) -> None:
    packed(class_folders(tmp_path / "src", {"cat": 7, "dog": 6}), tmp_path / "out", shard_size=9_000)
    written, made = load_index(tmp_path / "out" / "index.npz"), index_tars(tmp_path / "out")
    for name in ("shards", "classes", "kind"):
        assert getattr(made, name) == getattr(written, name)
    for name in ("sizes", "shard", "offset", "length", "label", "checksum"):
        assert np.array_equal(getattr(made, name), getattr(written, name))


def test_over_a_storage_it_is_the_same_index(tmp_path: Path) -> None:
    for shard in range(3):
        tar_file(tmp_path / f"{shard}.tar", entries(4 + shard, f"{shard}/"))
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")

    async def index() -> str:
        storage = open_storage(str(tmp_path), {})
        try:
            return (await index_storage(storage)).digest
        finally:
            await storage.close()

    assert asyncio.run(index()) == index_tars(tmp_path).digest


def test_a_shard_is_read_by_large_ranges_and_once(tmp_path: Path) -> None:
    content = tar_file(tmp_path / "a.tar", {f"{n}.{s}": c for n in range(40) for s, c in large(n).items()}).read_bytes()
    asked: list[tuple[int, int]] = []

    def read(start: int, length: int) -> bytes:
        asked.append((start, length))
        return content[start : start + length]

    assert len(index_shard(read, len(content), "a.tar").offset) == 40
    assert sum(length for _, length in asked) < 1.3 * len(content)
    assert len(asked) < 10


def large(number: int) -> dict[str, bytes]:
    return {"jpg": bytes([number]) * 500_000, "cls": b"0"}


def cut(share: float) -> Callable[[bytes], bytes]:
    return lambda content: content[: int(len(content) * share)]


def flip(place: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:place] + b"\xff\xfe" + content[place + 2 :]


def without_end(content: bytes) -> bytes:
    return content.rstrip(b"\0") + bytes(-len(content.rstrip(b"\0")) % 512)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut(0.5), r"a.tar (ends within|is damaged at or after) 0000\d.*truncated|unexpected end"),
        (without_end, r"a.tar ends after 00003.cls without a tar's mark of the end: it is truncated"),
        (
            flip(2 * 512 + len(jpeg(0)) // 512 * 512 + 148),
            r"a.tar is damaged after 00000.jpg: at byte \d+ is no header",
        ),
        (flip(148), r"a.tar is damaged at or after its first entry: bad checksum|invalid header"),
        (lambda content: b"", r"a.tar is damaged at or after its first entry: empty file"),
        (lambda content: b"no tar at all" * 100, r"a.tar is damaged at or after its first entry"),
        (gzip.compress, r"a.tar is compressed by gzip.*gunzip"),
    ],
)
def test_a_damaged_tar_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], reason: str) -> None:
    path = tar_file(tmp_path / "a.tar", entries(4))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ShardIndexError, match=reason):
        index_tars(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"a.txt": b"x"}, r"a.tar holds no image"),
        (
            {"a.jpg": b"x", "a.txt": b"a caption"},
            r"a.tar: the image a has no label. A sample is KEY.jpg beside KEY.cls",
        ),
        ({"a.jpg": b"x", "a.cls": b"0", "b.jpg": b"y"}, r"the image b has no label"),
        ({"a.jpg": b"x", "a.cls": b"0", "b.cls": b"0"}, r"the label b.cls has no image"),
        ({"a.jpg": b"x", "a.png": b"y", "a.cls": b"0"}, r"a.tar: a.png is a second image of this key"),
        ({"a.jpg": b"x", "a.cls": b"cat"}, r"label of sample 0 is 'cat', not a number from 0.*classes.txt"),
        ({"a.jpg": b"x", "a.cls": b"-1"}, r"label of sample 0 is -1"),
        ({"a.jpg": b"x", "a.json": b"{"}, r"a.json is no JSON"),
        ({"a.jpg": b"x", "a.json": b'{"caption": "a"}'}, r"the image a has no label"),
        ({"a.jpg": b"x", "a.json": b'{"label": true}'}, r"the label in a.json is true, which is no class"),
        (
            {"a.jpg": b"x", "a.cls": b"1", "a.json": b'{"label": 2}'},
            r"a.tar: by its .cls file, the label of sample 0 is 1, and by its .json file 2",
        ),
        ({"a.jpg": b"x", "a.cls": b"0", "b.npy": b"y", "b.cls": b"0"}, r"holds .npy files beside images"),
    ],
)
def test_a_tar_of_something_else_is_named(tmp_path: Path, content: dict[str, bytes], reason: str) -> None:
    tar_file(tmp_path / "a.tar", content)
    with pytest.raises(ShardIndexError, match=reason):
        index_tars(tmp_path)


def test_a_key_twice_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("a.jpg", "a.cls", "a.jpg"):
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"0"))
    with pytest.raises(ShardIndexError, match=r"a.jpg is a second image of this key"):
        index_tars(tmp_path)


def test_a_label_beyond_the_classes_is_refused(tmp_path: Path) -> None:
    tar_file(tmp_path / "a.tar", {"a.jpg": b"x", "a.cls": b"2"})
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(ShardIndexError, match=r"label of sample 0 is 2, which is none of the 2 classes"):
        index_tars(tmp_path)


def test_blank_lines_in_classes_txt(tmp_path: Path) -> None:
    tar_file(tmp_path / "a.tar", {"a.jpg": b"x", "a.cls": b"dog"})
    (tmp_path / "classes.txt").write_text("cat\ndog\n\n  \n")
    assert index_tars(tmp_path).classes == ("cat", "dog")
    (tmp_path / "classes.txt").write_text("cat\n\ndog\n")
    with pytest.raises(ShardIndexError, match=r"Line 2 of classes.txt is blank"):
        index_tars(tmp_path)


_COUNTED = ["1", "10", "2"]


@pytest.mark.parametrize(("names", "label"), [(_COUNTED, b"1"), (_COUNTED, b"10"), (["01", "00"], b"1")])
def test_numbers_that_are_names_of_other_classes_are_refused(tmp_path: Path, names: list[str], label: bytes) -> None:
    tar_file(tmp_path / "a.tar", {"a.jpg": b"x", "a.cls": label})
    (tmp_path / "classes.txt").write_text("\n".join(names))
    with pytest.raises(ShardIndexError, match=r"a.tar: the label \d+ may be the place .* rename the classes: sed -i"):
        index_tars(tmp_path)


def test_numbers_that_are_clear_are_places_or_names(tmp_path: Path) -> None:
    tar_file(tmp_path / "a.tar", {"a.jpg": b"x", "a.cls": b"2", "b.jpg": b"y", "b.cls": b"0"})
    (tmp_path / "classes.txt").write_text("1\n10\n2\n")
    assert index_tars(tmp_path).label.tolist() == [2, 0], "place 2 has the name 2; none has the name 0"
    tar_file(tmp_path / "a.tar", {"a.jpg": b"x", "a.json": b'{"label": "10"}'})
    assert index_tars(tmp_path).label.tolist() == [1], "a string of JSON is a name"


def test_labels_of_two_kinds_are_refused(tmp_path: Path) -> None:
    tar_file(tmp_path / "a.tar", {"a.jpg": b"x", "a.cls": b"0"})
    tar_file(tmp_path / "b.tar", {"b.jpg": b"x", "b.json": b'{"label": 1}'})
    with pytest.raises(ShardIndexError, match=r"labels of a.tar are in .cls files, and those of b.tar in .json files"):
        index_tars(tmp_path)


def test_a_json_beside_a_cls_may_tell_the_same_or_something_else(tmp_path: Path) -> None:
    described = {"a.json": b'{"label": "dog"}', "b.json": b'{"label": "a dog on a bench"}', "c.json": b'{"cls": true}'}
    tar_file(tmp_path / "a.tar", {f"{key}.{suffix}": b"1" for key in "abc" for suffix in ("jpg", "cls")} | described)
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    assert index_tars(tmp_path).label.tolist() == [1, 1, 1]


def test_a_folder_without_tars_or_of_several_sets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardIndexError, match="There is no tar file in"):
        index_tars(tmp_path)
    (tmp_path / "a.tar.gz").touch()
    with pytest.raises(ShardIndexError, match=r"compressed tar files \(a.tar.gz\).*gunzip"):
        index_tars(tmp_path)
    for name in ("x-train-0.tar", "x-validation-0.tar"):
        tar_file(tmp_path / name, entries(1))
    with pytest.raises(ShardIndexError, match="shards of train and val, which are several sets"):
        index_tars(tmp_path)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("data/train-00000-of-00002.parquet", "train"),
        ("imagenet1k-validation-07.tar", "val"),
        ("test-sets/train/0.tar", "train"),
        ("contest-0.tar", None),
        ("training.tar", None),
        ("x_VAL_1.tar", "val"),
    ],
)
def test_the_split_that_a_name_tells(name: str, split: str | None) -> None:
    assert split_of(name) == split


def test_reads_that_need_a_thread_of_the_loop_get_one(tmp_path: Path) -> None:
    """As to renew a token; a machine with few cores has few such threads."""

    class Renewing(FolderStorage):
        async def read(self, name: str, start: int, length: int) -> bytes:
            await asyncio.to_thread(int)
            return await super().read(name, start, length)

    async def index() -> ShardIndex:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        storage = Renewing(str(tmp_path))
        try:
            return await asyncio.wait_for(index_storage(storage), 60)
        finally:
            await storage.close()

    for shard in range(3):
        tar_file(tmp_path / f"{shard}.tar", entries(2))
    assert len(asyncio.run(index())) == 6
