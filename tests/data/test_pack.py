"""Packing of images from class folders and tars: what comes out, and what is refused."""

from __future__ import annotations

import io
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image
from tests.data.packing import class_folders, jpeg, packed, records, tar_file, tree

from azureml_strategy.data.packing.images import ImageForm
from azureml_strategy.data.packing.pack import PackError
from azureml_strategy.data.shard_index import INDEX_NAME, check_record, load_index


def test_files_are_copied_as_they_are_with_the_labels_of_their_folders(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "src", {"cat": 12, "dög": 9})
    index = packed(source, tmp_path / "out", shard_size=20_000)[""]
    assert (index.kind, index.classes, len(index)) == ("images", ("cat", "dög"), 21)
    contents = records(tmp_path / "out", index)
    originals = {path.read_bytes(): path.parent.name for path in source.glob("*/*")}
    assert {content: index.classes[label] for content, label in zip(contents, index.label, strict=True)} == originals
    assert all(check_record(index, number, content) == content for number, content in enumerate(contents))
    assert load_index(tmp_path / "out" / INDEX_NAME).digest == index.digest
    assert len(index.shards) > 1
    assert (tmp_path / "out" / "classes.txt").read_text() == "cat\ndög\n"
    assert not (tmp_path / "out" / ".pack").exists()


def test_webdataset_reads_the_same_samples(tmp_path: Path) -> None:
    class_folders(tmp_path / "src", {"cat": 10, "dog": 10})
    index = packed(tmp_path / "src", tmp_path / "out", ImageForm(resize=24), shard_size=5_000)[""]
    urls = [str(tmp_path / "out" / name) for name in index.shards]
    read = list(webdataset.WebDataset(urls, shardshuffle=False).to_tuple("jpg", "cls"))
    assert [image for image, _ in read] == records(tmp_path / "out", index)
    assert [int(label) for _, label in read] == index.label.tolist()
    decoded = list(webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8").to_tuple("jpg", "cls"))
    assert {image.shape for image, _ in decoded} == {(24, 32, 3)}


def test_samples_are_shuffled_by_the_seed_and_shards_are_of_about_the_size_asked_for(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "src", {"cat": 60, "dog": 60})
    index = packed(source, tmp_path / "a", ImageForm(resize=30), shard_size=40_000)[""]
    assert all(0.7 < size / 40_000 < 1.3 for size in index.sizes)
    for shard in range(len(index.shards)):
        assert len(set(index.label[index.shard == shard].tolist())) == 2, "each shard is a mixture of the classes"
    again = packed(source, tmp_path / "b", ImageForm(resize=30), shard_size=40_000)[""]
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    other = packed(source, tmp_path / "c", ImageForm(resize=30), shard_size=40_000, seed=1)[""]
    assert again.label.tolist() != other.label.tolist()
    assert Counter(records(tmp_path / "b", again)) == Counter(records(tmp_path / "c", other))


def test_the_shorter_side_becomes_what_was_asked_for_and_nothing_is_enlarged(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "all"
    folder.mkdir(parents=True)
    small = jpeg(3, (20, 30))
    files = {
        "0.jpg": jpeg(0, (64, 48)),
        "1.jpg": jpeg(1, (40, 400)),
        "2.png": jpeg(2, (64, 64), "RGBA", "PNG"),
        "3.jpg": small,
        "4.jpg": jpeg(4, (64, 48), "CMYK"),
        "5.jpg": jpeg(5, (64, 48), "L"),
        "6.png": jpeg(6, (16, 16), "RGB", "PNG"),
        "7.jpg": jpeg(7, (16, 16), "CMYK"),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    packed(tmp_path / "src", tmp_path / "out", ImageForm(resize=32))
    samples = {sample["__key__"]: sample["jpg"] for sample in read_tars(tmp_path / "out")}
    images = [Image.open(io.BytesIO(samples[f"{number:08}"])) for number in range(len(files))]
    sizes = [(43, 32), (32, 320), (32, 32), (20, 30), (43, 32), (43, 32), (16, 16), (16, 16)]
    assert [image.size for image in images] == sizes
    assert {image.mode for image in images} == {"RGB"}
    assert samples["00000003"] == small, "it is small already: encoding it once more would only lose"
    assert {image.format for image in images} == {"JPEG"}


def test_resizing_does_not_alias(tmp_path: Path) -> None:
    """Stripes finer than the result can show become an even grey."""
    (tmp_path / "src" / "all").mkdir(parents=True)
    stripes = np.zeros((512, 512, 3), np.uint8)
    stripes[::2] = 255
    Image.fromarray(stripes).save(tmp_path / "src" / "all" / "a.png")
    index = packed(tmp_path / "src", tmp_path / "out", ImageForm(resize=50, raw=True))[""]
    pixels = np.load(io.BytesIO(records(tmp_path / "out", index)[0]))
    assert np.abs(pixels.astype(int)[4:-4, 4:-4] - 127).max() < 8


def test_raw_records_are_pixels(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "src", {"cat": 3, "dog": 3})
    index = packed(source, tmp_path / "out", ImageForm(resize=24, raw=True))[""]
    assert (index.kind, index.facts["resize"]) == ("raw", 24)
    for content in records(tmp_path / "out", index):
        pixels = np.load(io.BytesIO(content))
        assert (pixels.shape, pixels.dtype) == ((24, 32, 3), np.uint8)
    read = list(webdataset.WebDataset([str(tmp_path / "out" / name) for name in index.shards], shardshuffle=False))
    assert {key for sample in read for key in sample} >= {"npy", "cls"}


def test_raw_in_full_size_is_refused_with_what_it_would_take(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "src", {"cat": 3})
    with pytest.raises(PackError, match=r"takes about \d+ times as much as the files. Type .* --raw --resize 256"):
        packed(source, tmp_path / "out", ImageForm(raw=True))
    assert not (tmp_path / "out").exists()


def test_validation_has_the_labels_of_training(tmp_path: Path) -> None:
    class_folders(tmp_path / "src" / "train", {"cat": 3, "dog": 4, "eel": 5})
    class_folders(tmp_path / "src" / "val", {"cat": 1, "eel": 2}, first=100)
    (tmp_path / "src" / "val" / "dog").mkdir()
    with pytest.warns(UserWarning, match=r"1 of 3 class folders in .*val have no image: dog"):
        indexes = packed(tmp_path / "src", tmp_path / "out")
    assert {name: index.classes for name, index in indexes.items()} == dict.fromkeys(
        ("train", "val"), ("cat", "dog", "eel")
    )
    assert sorted(indexes["val"].label.tolist()) == [0, 2, 2]
    assert load_index(tmp_path / "out" / "val" / INDEX_NAME).digest == indexes["val"].digest
    (tmp_path / "src" / "val" / "dog").rmdir()
    assert sorted(packed(tmp_path / "src", tmp_path / "again")["val"].label.tolist()) == [0, 2, 2]


def test_a_class_of_validation_only_is_refused(tmp_path: Path) -> None:
    class_folders(tmp_path / "src" / "train", {"cat": 3})
    class_folders(tmp_path / "src" / "val", {"dog": 1})
    with pytest.raises(PackError, match=r"has 1 class folder\(s\) that .*train has not: dog"):
        packed(tmp_path / "src", tmp_path / "out")


def test_validation_and_test_without_training_are_no_set(tmp_path: Path) -> None:
    for name in ("x-validation-0.tar", "x-test-0.tar"):
        tar_file(tmp_path / name, {"a.jpg": jpeg(0), "a.cls": b"0"})
    reason = rf"{tmp_path} holds files of test and val, .* none of train.*data pack {tmp_path}/val OUT/val"
    with pytest.raises(PackError, match=reason):
        packed(tmp_path, tmp_path / "out")
    (tmp_path / "x-test-0.tar").unlink()
    assert list(packed(tmp_path, tmp_path / "out")) == [""], "one split alone is a set"


def test_tars_are_packed_anew(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    for shard in range(3):
        numbers = range(4 * shard, 4 * shard + 4)
        entries = {f"a/{number}.{suffix}": content for number in numbers for suffix, content in sample(number).items()}
        tar_file(source / f"imagenet-train-{shard}.tar", entries)
    tar_file(source / "imagenet-validation-0.tar", {f"b.{suffix}": each for suffix, each in sample(0).items()})
    indexes = packed(source, tmp_path / "out")
    train = indexes["train"]
    found = dict(zip(records(tmp_path / "out" / "train", train), train.label.tolist(), strict=True))
    assert found == {jpeg(number): number % 3 for number in range(12)}
    assert len(indexes["val"]) == 1
    assert indexes["val"].classes == train.classes == ("0", "1", "2")


def test_a_packed_set_is_packed_smaller_by_its_index(tmp_path: Path) -> None:
    class_folders(tmp_path / "src" / "train", {"cat": 3, "dog": 4})
    packed(tmp_path / "src", tmp_path / "out")
    index = packed(tmp_path / "out", tmp_path / "small", ImageForm(resize=12))["train"]
    assert (index.classes, len(index), index.facts["resize"]) == (("cat", "dog"), 7, 12)


def test_unreadable_images_are_named_and_left_out_up_to_a_number(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "src", {"cat": 8, "dog": 8})
    whole = jpeg(500)
    (source / "cat" / "001.JPEG").write_bytes(whole[: len(whole) // 2])
    (source / "dog" / "002.JPEG").write_bytes(b"text")
    (source / "dog" / "003.JPEG").write_bytes(b"")
    with pytest.raises(PackError, match=r"[123] of 16 images cannot be read so far, and --max-unreadable is 0: .*JPEG"):
        packed(source, tmp_path / "out", shard_size=10_000)
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}
    index = packed(source, tmp_path / "out", shard_size=10_000, max_unreadable=3)[""]
    assert len(index) == 13
    assert [name.split(" ")[0] for name in index.facts["unreadable"]] == [
        "cat/001.JPEG",
        "dog/002.JPEG",
        "dog/003.JPEG",
    ]
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in done} == done, "what was packed stays"
    packed(source, tmp_path / "at-once", shard_size=10_000, max_unreadable=5)
    assert tree(tmp_path / "out") == tree(tmp_path / "at-once")


def test_nothing_is_packed_of_images_that_all_are_unreadable(tmp_path: Path) -> None:
    (tmp_path / "src" / "cat").mkdir(parents=True)
    (tmp_path / "src" / "cat" / "a.jpg").write_bytes(b"text")
    with pytest.raises(PackError, match=r"None of the first images can be read; the last: cat/a.jpg \(Unidentified"):
        packed(tmp_path / "src", tmp_path / "a", ImageForm(resize=8), max_unreadable=9)
    with pytest.raises(PackError, match="None of the images of the source can be read"):
        packed(tmp_path / "src", tmp_path / "b", max_unreadable=9)


def test_what_is_there_already_is_not_written_over(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "src", {"cat": 3})
    first = packed(source, tmp_path / "out")
    assert packed(source, tmp_path / "out")[""].digest == first[""].digest, "it is done already"
    with pytest.raises(PackError, match=r"holds a packed set already.*rm -r"):
        packed(source, tmp_path / "out", seed=3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    with pytest.raises(PackError, match=r"is not empty: it holds notes. Give a folder"):
        packed(source, tmp_path / "full")


def test_half_packed_with_other_options_or_another_source_is_refused(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "src", {"cat": 3})
    (source / "cat" / "bad.jpg").write_bytes(b"text")
    with pytest.raises(PackError, match="--max-unreadable 100"):
        packed(source, tmp_path / "out", seed=1)
    with pytest.raises(
        PackError, match=r"half packed with --resize None, --seed 1, and now it is --resize 9, --seed 2"
    ):
        packed(source, tmp_path / "out", ImageForm(resize=9), seed=2)
    os.utime(source / "cat" / "000.JPEG", ns=(0, 0))
    with pytest.raises(PackError, match=r"half packed, and the source has changed since.*rm -r"):
        packed(source, tmp_path / "out", seed=1)


def test_a_shard_that_was_damaged_since_is_written_again(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "src", {"cat": 6})
    (source / "cat" / "bad.jpg").write_bytes(b"text")
    with pytest.raises(PackError):
        packed(source, tmp_path / "out")
    shard = tmp_path / "out" / "shard-000000.tar"
    shard.write_bytes(shard.read_bytes()[:-512])
    packed(source, tmp_path / "out", max_unreadable=1)
    packed(source, tmp_path / "at-once", max_unreadable=1)
    assert tree(tmp_path / "out") == tree(tmp_path / "at-once")


def sample(number: int) -> dict[str, bytes]:
    return {"jpg": jpeg(number), "cls": str(number % 3).encode(), "txt": b"a caption"}


def read_tars(folder: Path) -> list[dict[str, bytes]]:
    return list(webdataset.WebDataset([str(path) for path in sorted(folder.glob("*.tar"))], shardshuffle=False))
