"""What each filter of a data set passes over is said once, counted and named; where it is nothing, nothing is said."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.data.packing import jpeg, packed, tar_file
from tests.data.test_pack_tables import content, parquet
from tests.tiny_model import save_tiny_model

from azureml_strategy.cli import main
from azureml_strategy.data import ChatDataModule, ImageFolderDataModule, ShardedImages, TextDataModule
from azureml_strategy.data.folders import scan_class_folders
from azureml_strategy.data.packing.images import ImageForm
from azureml_strategy.data.packing.sources import find_images

Files = Mapping[str, bytes]
ANSWER = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
TEXTS = {f"{name}.txt": b"to be or not to be" * 40 for name in "abc"}
SHARD = {"0.jpg": jpeg(0), "0.cls": b"0", "1.jpg": jpeg(1), "1.cls": b"1", "1.json": b'{"label": 1, "by": "me"}'}


def images(*names: str) -> Files:
    return {name: jpeg(number) for number, name in enumerate(names)}


def lines(*samples: object) -> Files:
    plain = [ANSWER, {"prompt": "1+1=", "completion": "2"}, {"text": "two"}]
    return {"rows.jsonl": "\n".join(map(json.dumps, [*plain, *samples])).encode()}


def scan(root: Path) -> None:
    scan_class_folders(root)


def train_on_folders(root: Path) -> None:
    data = ImageFolderDataModule(root, batch_size=1)
    data.prepare_data()
    data.setup("fit")


def read_text(root: Path) -> None:
    data = TextDataModule(root, cache=root.parent / "tokens", sequence_length=16)
    data.prepare_data()
    data.setup("fit")


def pack_text(root: Path) -> None:
    assert main(["data", "pack", str(root), str(root.parent / "out"), "--text", "--workers", "1"]) == 0


def read_chat(root: Path) -> None:
    data = ChatDataModule(
        str(save_tiny_model(root.parent / "tiny")), root, cache=root.parent / "tokens", sequence_length=64
    )
    data.prepare_data()
    data.setup("fit")


def read_tars(root: Path) -> None:
    ShardedImages(root)


def find(root: Path) -> None:
    find_images(root, ImageForm())


def pack_images(root: Path) -> None:
    packed(root, root.parent / "out")


# filter: how it is met, what it takes, and what it passes over, with the words that say so
FILTERS: dict[str, tuple[Callable[[Path], None], Files, dict[str, tuple[Files, str]]]] = {
    "class folders": (
        scan,
        images("cat/0.jpg", "cat/1.JPG", "dog/2.webp"),
        {
            "extensions": (
                images("cat/x.tif", "dog/y.gif"),
                r"3 images are read, and 2 other .*: cat/x.tif, dog/y.gif",
            ),
            "folders": (images("cat/more/x.jpg"), r"and 1 other .*: cat/more/\. "),
            "beside": (images("x.jpg", "y.png"), r"and 2 other .*: x.jpg, y.png\. "),
            "many": (images(*(f"cat/{number}.tif" for number in range(9))), r"and 9 other .*0.tif, .*2.tif, \.\.\.\. "),
        },
    ),
    "image folders": (
        train_on_folders,
        images("train/cat/0.jpg", "train/dog/1.jpg", "val/cat/2.jpg", "val/dog/3.jpg"),
        {"extensions": (images("train/cat/x.heic"), r"train: 2 images are read, and 1 other .*: cat/x.heic")},
    ),
    "texts": (
        read_text,
        TEXTS,
        {
            "pattern": ({"A.TXT": b"x", "deep/b.md": b"x"}, r"3 files .* 2 others .*'\*\.txt': A.TXT, deep/b.md\. "),
            "empty": ({"e.txt": b""}, r"1 empty files are passed over: e.txt\."),
        },
    ),
    "packed texts": (pack_text, TEXTS, {"pattern": ({"b.txt.gz": b"x"}, r"1 others .*: b.txt.gz\. ")}),
    "conversations": (
        read_chat,
        lines(),
        {
            "pattern": ({"more.json": b"{}"}, r"1 others .*: more.json\. "),
            "no answer": (
                lines({"messages": ANSWER["messages"][:1]}),
                r"3 samples are read, and 1 others .*: .*rows.jsonl:4\. ",
            ),
            "keys": (
                lines({**ANSWER, "tools": [], "system": "Be kind."}, {"text": "x", "system": "Be kind."}),
                r"2 keys of the lines are not read: system \(2 lines\), tools \(1 lines\)\. ",
            ),
            "keys of messages": (
                lines({"messages": [{**each, "name": "Ada"} for each in ANSWER["messages"]]}),
                r"1 keys of the messages are not read by the chat template: name \(2 messages\)\. ",
            ),
            "length": (
                lines({"text": "z" * 400}),
                r"1 of 4 samples are longer than data.sequence_length=64 .*: 3\d\d of",
            ),
        },
    ),
    "packed images": (
        pack_images,
        images("train/cat/0.jpg", "val/cat/1.jpg"),
        {
            "splits": (images("test/cat/2.jpg"), r"train and val are packed, and not test/ \(1\)"),
            "extensions": (images("val/cat/x.tif"), r"val: 1 images are read, and 1 other .*: cat/x.tif"),
        },
    ),
}
NO_DATA = {"README.md": b"x", ".gitkeep": b"", "LICENSE": b"x", ".hidden/x": b"x"}
CASES = [(kind, what) for kind, (*_, others) in FILTERS.items() for what in others]


def write(root: Path, files: Files) -> None:
    for name, written in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(written)


def said(call: Callable[[Path], None], root: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(root)
    return [
        str(each.message) for each in caught if str(root.parent) in str(each.message) or "data." in str(each.message)
    ]


@pytest.mark.parametrize(("kind", "what"), CASES)
def test_it_is_said_once_with_count_and_names(tmp_path: Path, kind: str, what: str) -> None:
    call, files, others = FILTERS[kind]
    more, words = others[what]
    write(tmp_path / "data", {**files, **more})
    (text,) = said(call, tmp_path / "data")
    assert re.search(words, text), text


def test_a_later_run_tells_of_conversations_that_were_left_out_before(tmp_path: Path) -> None:
    write(tmp_path / "data", lines({**ANSWER, "system": "Be kind."}))
    first, second = (said(read_chat, tmp_path / "data") for _ in range(2))
    assert len(first) == 1
    assert second == first


@pytest.mark.parametrize("kind", FILTERS)
def test_nothing_is_said_of_what_is_no_data(tmp_path: Path, kind: str) -> None:
    call, files, _ = FILTERS[kind]
    write(tmp_path / "data", {**files, **NO_DATA})
    assert said(call, tmp_path / "data") == []


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"2.tif": b"x", "2.json": b'{"label": 1}'},
            r"2 samples are read.* 2 files .* no image: a.tar: 2.json, a.tar: 2.tif",
        ),
        ({"0.txt": b"x", "1.txt": b"x", "1.seg.png": b"x"}, r"beside images, .* count: \.txt \(2\), \.seg\.png \(1\)"),
        ({"._0.jpg": b"x", "__MACOSX/0.tif": b"x"}, None),
        ({}, None),
    ],
)
def test_files_of_tars_that_are_of_no_sample(tmp_path: Path, more: Files, words: str | None) -> None:
    """Each run says so, and not only the one that makes the index."""
    root = tmp_path / "data"
    root.mkdir()
    tar_file(root / "a.tar", {**SHARD, **more})
    for _ in range(2):
        texts = said(read_tars, root)
        assert len(texts) == (words is not None)
        assert words is None or re.search(words, texts[0]), texts
    assert (root / "index.npz").is_file()


def test_tars_that_are_compressed_beside_others_are_named(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    tar_file(root / "a.tar", SHARD)
    (root / "b.tar.gz").write_bytes(b"x")
    (root / "C.TAR").write_bytes(b"x")
    (text,) = said(read_tars, root)
    assert re.search(
        r"2 samples are read, .* 2 files that belong to no image: C.TAR, b.tar.gz\. .*not compressed", text
    )


def test_an_index_that_counts_what_it_passes_over_is_the_same_set(tmp_path: Path) -> None:
    """An older version has written the same index without the count, and ranks compare its digest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tar_file(tmp_path / "a.tar", {**SHARD, "2.tif": b"x"})
        index = ShardedImages(tmp_path).index
    assert "passed_over" in index.facts
    assert replace(index, facts={}).digest == index.digest


def test_tables_say_which_columns_are_not_packed(tmp_path: Path) -> None:
    rows = content(range(6))
    root = tmp_path / "data"
    parquet(root / "train-0.parquet", rows)
    assert said(find, root) == []
    parquet(root / "train-0.parquet", rows.append_column("caption", [["x"] * 6]))
    (text,) = said(find, root)
    assert re.search(r"the columns image and label are packed, and 1 others are not: caption\.", text)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (
            ["extra.csv", "more/rows.jsonl"],
            r"1 Parquet or Arrow files are packed, and 2 other .*: extra.csv, more/rows",
        ),
        (["train-1.PARQUET"], r"and 1 other files are passed over: train-1.PARQUET\. "),
        (["a/preview.jpg", "zz/preview.jpg"], r"and 2 other files are passed over: a/preview.jpg, zz/preview.jpg\. "),
        (["dataset_info.json", "dataset_infos.json", "README.md", ".git/x", "cache-1.arrow"], None),
    ],
)
def test_files_beside_tables(tmp_path: Path, others: list[str], words: str | None) -> None:
    root = tmp_path / "data"
    parquet(root / "train-0.parquet", content(range(6)))
    write(root, dict.fromkeys(others, b"x"))
    texts = said(find, root)
    assert len(texts) == (words is not None), texts
    assert words is None or re.search(words, texts[0]), texts


def test_tables_in_folders_after_images_are_packed(tmp_path: Path) -> None:
    root = tmp_path / "data"
    for name in ("a/train-0", "c/train-1", "license_plates/train-2"):
        parquet(root / f"{name}.parquet", content(range(6)))
    write(root, {"b/preview.jpg": b"x"})
    with pytest.warns(UserWarning, match="1 other files are passed over: b/preview.jpg"):
        (part,) = find_images(root, ImageForm()).values()
    assert part.count == 18


def test_show_says_in_words_what_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "data"
    root.mkdir()
    tar_file(root / "a.tar", {**SHARD, "2.tif": b"x"})
    said(read_tars, root)
    assert main(["data", "show", str(root)]) == 0
    told = capsys.readouterr().out
    assert "1 files that belong to no image: a.tar: 2.tif" in " ".join(told.replace("|", " ").split())
    assert "{" not in told


def test_a_split_that_is_not_packed_is_named(tmp_path: Path) -> None:
    root = tmp_path / "data"
    for name in ("train", "val", "test"):
        parquet(root / f"{name}-0.parquet", content(range(6)))
    (text,) = said(find, root)
    assert re.search(r"train and val are packed, and not test-0.parquet \(1\)", text)
