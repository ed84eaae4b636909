"""Packed images by number: in loaders of users' own, under our data sets, and where records or blobs are damaged."""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.data.azurite import Azurite
from tests.data.packing import tar_file
from tests.data.tar_sets import write_set
from torch.utils.data import DataLoader

from azureml_strategy.data import (
    EvaluationImages,
    PlannedLoader,
    ResumableLoader,
    ShardedImages,
    ShardIndexError,
    TrainingImages,
    TrainingSampler,
    UnreadableImagesError,
)
from azureml_strategy.data.node_cache.client import CacheSettings
from azureml_strategy.data.shard_index import INDEX_NAME
from azureml_strategy.data.storage import StorageError

CLASSES = ["cat", "dog", "eel"]


def photo(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (3, 4, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((30, 24)).save(file, "JPEG", quality=95)
    return file.getvalue()


def write_images(folder: Path, count: int = 10) -> Path:
    samples = [(f"{number:04}.jpg", photo(number), number % 3) for number in range(count)]
    write_set(folder, [samples[: count // 2], samples[count // 2 :]], CLASSES)
    return folder


def write_folders(root: Path, count: int = 10) -> Path:
    for number in range(count):
        path = root / CLASSES[number % 3] / f"{number:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo(number))
    return root


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.resize((8, 8)))).float()


def digests(data: Any) -> Counter[tuple[str, int]]:
    return Counter((hashlib.sha256(image.contiguous().numpy()).hexdigest(), int(label)) for image, label in data)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_ones_own_with_a_transform(tmp_path: Path, workers: int) -> None:
    data = ShardedImages(write_images(tmp_path), transform=to_tensor)
    assert (len(data), data.classes, data.labels.tolist()) == (10, ("cat", "dog", "eel"), [n % 3 for n in range(10)])
    images, labels = next(iter(DataLoader(data, batch_size=10, num_workers=workers)))
    assert images.shape == (10, 8, 8, 3)
    assert labels.tolist() == data.labels.tolist()
    expected = to_tensor(Image.open(io.BytesIO(photo(7))).convert("RGB"))
    assert torch.equal(images[7], expected)
    assert torch.equal(data[7][0], expected)
    data.close()


def test_without_a_transform_there_are_pixels(tmp_path: Path) -> None:
    pixels, label = ShardedImages(write_images(tmp_path))[5]
    assert (pixels.shape, pixels.dtype, label) == ((24, 30, 3), np.uint8, 2)


def test_sixteen_bits_of_grey_become_eight_of_rgb_as_everywhere(tmp_path: Path) -> None:
    grey = io.BytesIO()
    Image.fromarray(np.full((8, 8), 30_000, np.uint16)).save(grey, "PNG")
    write_set(tmp_path, [[("0.png", grey.getvalue(), 0)]], CLASSES)
    packed = ShardedImages(tmp_path)
    assert np.unique(packed[0][0]).tolist() == [116], "30,000 / 257"
    assert EvaluationImages(packed, image_size=8)[0][0].unique().tolist() == [116]


def test_tars_that_changed_are_indexed_anew_behind_a_cache(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for number, label in enumerate((b"0", b"1")):
        tar_file(tmp_path / "set" / "a.tar", {"0.jpg": photo(0), "0.cls": label})
        os.utime(tmp_path / "set" / "a.tar", (number, number))
        assert not number or (tmp_path / "set" / INDEX_NAME).is_file()
        data = ShardedImages(tmp_path / "set", cache=CacheSettings(tmp_path / f"cache{number}", 10_000_000))
        assert (data.labels.tolist(), data[0][1]) == ([number], number)
        data.close()


def test_samples_are_those_of_the_class_folders(tmp_path: Path) -> None:
    packed, plain = ShardedImages(write_images(tmp_path / "packed")), write_folders(tmp_path / "plain")
    ours, theirs = EvaluationImages(packed, image_size=8), EvaluationImages(plain, image_size=8)
    assert digests(ours[n] for n in range(10)) == digests(theirs[n] for n in range(10))
    batches = PlannedLoader(ours, batch_size=5, num_workers=2)
    assert digests(pair for images, labels in batches for pair in zip(images, labels, strict=True)) == digests(
        theirs[n] for n in range(10)
    )


def test_a_damaged_record_is_counted_like_an_unreadable_image(
    tmp_path: Path, azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_images(tmp_path / "set")
    index = ShardedImages(folder).index
    shard = folder / index.shards[1]
    content = bytearray(shard.read_bytes())
    content[int(index.offset[7]) + 200] ^= 1
    shard.write_bytes(content)
    for name, value in azurite.environment.items():
        monkeypatch.setenv(name, value)
    named = r"unreadable image: .*shard-000001.tar, byte \d+ .*checksum.*1 of 10"
    for root in (str(folder), azurite.upload(folder)):
        for cache in (None, CacheSettings(tmp_path / "cache", 10_000_000)):
            source = ShardedImages(root, cache=cache)
            training = TrainingImages(source, image_size=8)
            with pytest.warns(RuntimeWarning, match=named):
                batch = training.__getitems__(list(range(10)))
            assert bool(batch.images[7].any()), "another one stands in"
            with pytest.raises(UnreadableImagesError, match="max_unreadable=0"):
                TrainingImages(source, image_size=8, max_unreadable=0)[7]
            source.close()


def test_storage_that_fails_ends_the_run_and_is_no_unreadable_image(
    tmp_path: Path, azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = azurite.upload(write_images(tmp_path / "set"))
    for name, value in azurite.environment.items():
        monkeypatch.setenv(name, value)
    source = ShardedImages(address)
    training = TrainingImages(source, image_size=8)
    assert len(training.__getitems__([0, 1])) == 2
    azurite.replace(f"{address}/{source.index.shards[0]}", b"\0" * int(source.index.sizes[0]))
    with pytest.raises(StorageError, match=r"shard-000000\.tar.* was changed"):
        training.__getitems__([2, 3])
    assert not training.unreadable
    assert len(training.__getitems__([8, 9])) == 2, "the other shard is as it was"
    source.close()


def test_the_loader_tells_what_comes(tmp_path: Path) -> None:
    told: list[Any] = []

    class Told(ShardedImages):
        def expect(self, numbers: Any, following: Any) -> None:
            told.append((numbers.tolist(), following.tolist()))

        def reached(self, position: int) -> None:
            told.append(position)

    images = TrainingImages(Told(write_images(tmp_path)), image_size=8)
    sampler = TrainingSampler(images, 2, 1, seed=3)
    sampler.set_epoch(4)
    loader = ResumableLoader(images, sampler=sampler, batch_size=2)
    assert len(list(loader)) == 2
    (numbers, following), *positions = told
    assert numbers == [draw % 10 for draw in sampler]
    sampler.set_epoch(5)
    assert following == [draw % 10 for draw in sampler]
    assert positions == [2, 4]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    tokens = io.BytesIO()
    np.save(tokens, np.zeros(10, np.uint8))
    write_set(tmp_path / "text", [[("0.npy", tokens.getvalue(), 0)]], kind="tokens")
    with pytest.raises(ShardIndexError, match="holds tokens, not images"):
        ShardedImages(tmp_path / "text")
    with pytest.raises(ShardIndexError, match="data pack SRC OUT"):
        ShardedImages(tmp_path / "nothing")
