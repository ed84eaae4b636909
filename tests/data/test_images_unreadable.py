"""Counting of unreadable images."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from azureml_strategy.data.images import TrainingImages
from azureml_strategy.data.unreadable import UnreadableImages, UnreadableImagesError


def _path(index: int) -> str:
    return f"/data/{index}.jpg"


def test_each_is_named_with_its_reason_and_counted_once() -> None:
    images = UnreadableImages(10, 2, _path)
    for _ in range(5):
        with pytest.warns(RuntimeWarning, match=r"/data/3\.jpg \(OSError: cut off\)\. 1 of 10 so far"):
            images.add(3, OSError("cut off"))
    assert 3 in images
    assert 4 not in images
    assert len(images) == 1


@pytest.mark.filterwarnings("ignore:Skipped")
def test_one_too_many_is_an_error_with_the_numbers_and_the_first_paths() -> None:
    images = UnreadableImages(1000, 6, _path)
    for index in range(10, 16):
        images.add(index, OSError("gone"))
    named = ", ".join(_path(index) for index in range(10, 15))
    with pytest.raises(UnreadableImagesError, match=rf"7 of 1000 .* of them: {named}\. .*ValueError: odd.*max_unread"):
        images.add(16, ValueError("odd"))


def test_no_readable_image_at_all_is_an_error_below_the_limit() -> None:
    images = UnreadableImages(1, 100, _path)
    with pytest.raises(UnreadableImagesError, match="1 of 1 images cannot be read, and max_unreadable=100"):
        images.add(0, OSError("gone"))


@pytest.mark.filterwarnings("ignore:Skipped")
def test_processes_share_the_count() -> None:
    images = UnreadableImages(10, 1, _path)
    process = multiprocessing.get_context("fork").Process(target=images.add, args=(7, OSError("gone")))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert 7 in images
    with pytest.raises(UnreadableImagesError, match=r"2 of 10 .*/data/2\.jpg, /data/7\.jpg"):
        images.add(2, OSError("gone"))


def test_where_another_worker_has_found_the_last_image_unreadable_no_image_is_sought(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.jpg").write_bytes(b"no image")
    images = TrainingImages(tmp_path, image_size=8)
    for _ in range(2):
        with pytest.raises(UnreadableImagesError, match="1 of 1 images cannot be read"):
            images[0]
