"""Packing of Hugging Face data sets: Parquet files, and folders of `save_to_disk`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from tests.data.packing import jpeg, packed, records

from azureml_strategy.data.packing.images import ImageForm
from azureml_strategy.data.packing.pack import PackError
from azureml_strategy.data.shard_index import ShardIndex

CLASSES = ("cat", "dog", "eel")


def features(image: str = "image", label: str = "label", classes: Sequence[str] = CLASSES) -> dict[str, Any]:
    return {image: {"_type": "Image"}, label: {"names": list(classes), "_type": "ClassLabel"}}


def content(
    numbers: Sequence[int], image: str = "image", label: str = "label", described: Mapping[str, Any] | None = None
) -> pyarrow.Table:
    """Rows as the `datasets` library writes them, with the features in the metadata of the schema."""
    images = [{"bytes": jpeg(number), "path": f"{number}.jpg"} for number in numbers]
    table = pyarrow.table({image: images, label: [number % 3 for number in numbers]})
    info = {"info": {"features": features(image, label) if described is None else described}}
    return table.replace_schema_metadata({"huggingface": json.dumps(info)})


def parquet(path: Path, table: pyarrow.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, path, row_group_size=4)


def arrow(folder: Path, tables: Sequence[pyarrow.Table]) -> None:
    """A folder of `Dataset.save_to_disk`."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{len(tables):05}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        bare = table.replace_schema_metadata(None)
        with pyarrow.ipc.new_stream(str(folder / name), bare.schema) as writer:
            writer.write_table(bare, max_chunksize=3)
    (folder / "dataset_info.json").write_text(json.dumps({"features": features()}))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def found(out: Path, index: ShardIndex) -> dict[bytes, int]:
    return dict(zip(records(out, index), index.label.tolist(), strict=True))


def test_parquet_with_splits(tmp_path: Path) -> None:
    parquet(tmp_path / "src" / "data" / "train-00000-of-00002.parquet", content(range(10)))
    parquet(tmp_path / "src" / "data" / "train-00001-of-00002.parquet", content(range(10, 17)))
    parquet(tmp_path / "src" / "data" / "validation-00000-of-00001.parquet", content(range(17, 20)))
    parquet(tmp_path / "src" / "data" / "test-00000-of-00001.parquet", content(range(20, 21)))
    indexes = packed(tmp_path / "src", tmp_path / "out", shard_size=12_000)
    assert {name: index.classes for name, index in indexes.items()} == dict.fromkeys(("train", "val"), CLASSES)
    assert found(tmp_path / "out" / "train", indexes["train"]) == {jpeg(each): each % 3 for each in range(17)}
    assert found(tmp_path / "out" / "val", indexes["val"]) == {jpeg(each): each % 3 for each in range(17, 20)}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train", "val"]


def test_test_is_the_validation_of_a_set_that_has_no_other(tmp_path: Path) -> None:
    for split, numbers in (("train", range(6)), ("test", range(6, 8))):
        parquet(tmp_path / "src" / "plain" / split / "0000.parquet", content(numbers, "img", "fine_label"))
    indexes = packed(tmp_path / "src", tmp_path / "out", ImageForm(resize=12))
    assert {name: len(index) for name, index in indexes.items()} == {"train": 6, "val": 2}


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    arrow(tmp_path / "one", [content(range(7)), content(range(7, 9))])
    (tmp_path / "one" / "cache-0123.arrow").write_bytes(b"what `map` keeps is none of the set")
    index = packed(tmp_path / "one", tmp_path / "out")[""]
    assert found(tmp_path / "out", index) == {jpeg(each): each % 3 for each in range(9)}
    assert index.classes == CLASSES
    arrow(tmp_path / "two" / "train", [content(range(5))])
    arrow(tmp_path / "two" / "test", [content(range(5, 6))])
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert {name: len(each) for name, each in packed(tmp_path / "two", tmp_path / "2").items()} == {
        "train": 5,
        "val": 1,
    }


def test_one_file_of_numbers_without_names(tmp_path: Path) -> None:
    table = pyarrow.table({"picture": [jpeg(each) for each in range(4)], "label": [0, 1, 2, 2]})
    parquet(tmp_path / "src" / "all.parquet", table)
    index = packed(tmp_path / "src", tmp_path / "out")[""]
    assert (index.classes, sorted(index.label.tolist())) == (("0", "1", "2"), [0, 1, 2, 2])


def test_an_unreadable_image_is_named_by_its_row(tmp_path: Path) -> None:
    for name, images in (("train-0", [jpeg(0)]), ("train-1", [jpeg(1), b"text", jpeg(2)])):
        table = pyarrow.table({"image": images, "label": list(range(len(images)))})
        parquet(tmp_path / "src" / "data" / f"{name}.parquet", table)
    with pytest.raises(PackError, match=r"data/train-1.parquet, row 1 \(Unidentified"):
        packed(tmp_path / "src", tmp_path / "out")


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (
            pyarrow.table({"a": [{"bytes": b"x"}], "b": [{"bytes": b"x"}], "label": [0]}),
            r"unclear which column of .* is the image. Its columns: a, b, label. .*rename_column",
        ),
        (pyarrow.table({"image": [b"x"], "y": [0], "z": [1]}), r"is the label. Its columns: image, y, z"),
        (pyarrow.table({"image": [b"x"], "label": ["cat"]}), r"label of .* are of type string.*class_encode_column"),
        (content([0], described=features(classes=())), None),
        (content([0, 1, 2], described=features(classes=("cat", "dog"))), r"are from 0 to 2, and there are 2 classes"),
        (
            pyarrow.table({"image": [{"bytes": None, "path": "/x/1.jpg"}], "label": [0]}),
            r"row 0 has no image.*/x/1.jpg",
        ),
        (pyarrow.table({"image": [b"x"], "label": pyarrow.array([None], "int64")}), r"row 0 has no label"),
        (pyarrow.table({"image": [b"x"], "label": [-1]}), r"are from -1 to -1.*without a label"),
    ],
)
def test_what_is_unclear_is_refused(tmp_path: Path, table: pyarrow.Table, reason: str | None) -> None:
    parquet(tmp_path / "src" / "train.parquet", table)
    if reason is None:
        assert packed(tmp_path / "src", tmp_path / "out")["train"].classes == ("0",)
        return
    with pytest.raises(PackError, match=reason):
        packed(tmp_path / "src", tmp_path / "out")


def test_two_data_sets_in_one_folder_are_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "src" / "train-0.parquet", content(range(3)))
    parquet(tmp_path / "src" / "train-1.parquet", content(range(3), "img"))
    with pytest.raises(PackError, match=r"train-1.parquet has other columns or classes than train-0.parquet"):
        packed(tmp_path / "src", tmp_path / "out")
    parquet(tmp_path / "src" / "more.parquet", content(range(3)))
    with pytest.raises(PackError, match=r"more.parquet does not say whether it is for training"):
        packed(tmp_path / "src", tmp_path / "out")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "src" / "train.parquet"
    parquet(path, content(range(12)))
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes(2000) + whole[2100:])
    with pytest.raises(PackError, match=r"train.parquet cannot be read: .*Download the data set again"):
        packed(tmp_path / "src", tmp_path / "out", max_unreadable=12)
    path.write_bytes(whole[:-50])
    with pytest.raises(PackError, match=r"train.parquet cannot be read: .*Download the data set again"):
        packed(tmp_path / "src", tmp_path / "other")


def test_rows_of_raw_images(tmp_path: Path) -> None:
    parquet(tmp_path / "src" / "train.parquet", content(range(5)))
    with pytest.raises(PackError, match=r"takes about \d+ times"):
        packed(tmp_path / "src", tmp_path / "out", ImageForm(raw=True))
    index = packed(tmp_path / "src", tmp_path / "out", ImageForm(resize=12, raw=True))["train"]
    assert np.diff(index.offset).min() > 12 * 16 * 3
