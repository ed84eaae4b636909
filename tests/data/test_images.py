"""Data sets of files, good and bad, read by real worker processes."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from azureml_strategy.data import EvaluationImages, TrainingImages, UnreadableImagesError

WriteImages = Callable[[Path, int], Path]


def _grey(image: Tensor) -> int:
    """The number of the file, of which the grey of an image is ten times."""
    return round(image.float().mean().item() / 10)


def _bomb(path: Path) -> None:
    """A PNG that claims 20,000 x 20,000 pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b""))


def _broken_header(path: Path) -> None:
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + os.urandom(64))


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere.jpg")


_DAMAGE: dict[str, Callable[[Path], object]] = {
    "zero bytes": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:300]),
    "text": lambda path: path.write_text("<html>404 Not Found</html>"),
    "bomb": _bomb,
    "broken header": _broken_header,
    "directory": _directory,
    "deleted": Path.unlink,
    "dangling link": _dangling,
}


@pytest.mark.parametrize("kind", _DAMAGE)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_unreadable_image_is_named_counted_and_skipped(tmp_path: Path, write_images: WriteImages, kind: str) -> None:
    write_images(tmp_path / "a", 4)
    evaluation, training = EvaluationImages(tmp_path, image_size=8), TrainingImages(tmp_path, image_size=8)
    _DAMAGE[kind](tmp_path / "a" / "002.jpg")
    with pytest.warns(RuntimeWarning, match=r"a/002\.jpg .*1 of 4 so far, max_unreadable=100"):
        image, label = evaluation[2]
    assert label == -100
    assert image.shape == (3, 8, 8)
    assert not image.any()
    with pytest.warns(RuntimeWarning, match=r"a/002\.jpg"):
        substitute, label = training[2]
    assert _grey(substitute) in (0, 1, 3)
    assert label == 0
    assert (len(evaluation.unreadable), len(training.unreadable)) == (1, 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_forbidden_image_is_unreadable(tmp_path: Path, write_images: WriteImages) -> None:
    write_images(tmp_path / "a", 2)
    (tmp_path / "a" / "001.jpg").chmod(0)
    with pytest.warns(RuntimeWarning, match=r"PermissionError"):
        assert EvaluationImages(tmp_path, image_size=8)[1][1] == -100


def test_labels_and_images_are_those_of_the_files(tmp_path: Path, write_images: WriteImages) -> None:
    write_images(tmp_path / "a", 2)
    write_images(tmp_path / "b", 3)
    for images in (EvaluationImages(tmp_path, image_size=8), TrainingImages(tmp_path, image_size=8)):
        samples = [images[index] for index in range(len(images))]
        assert [(label, _grey(image)) for image, label in samples] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
        assert images.classes == ("a", "b")


def test_the_index_after_the_last_is_a_blank_that_no_metric_counts(tmp_path: Path, write_images: WriteImages) -> None:
    write_images(tmp_path / "a", 2)
    images = EvaluationImages(tmp_path, image_size=8)
    image, label = images[2]
    assert (image.shape, image.dtype, label) == ((3, 8, 8), torch.uint8, -100)
    assert not images.unreadable


def test_augmentation_depends_on_seed_and_draw_alone(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "a").mkdir()
    Image.radial_gradient("L").save(tmp_path / "a" / "0.png")
    images = TrainingImages(tmp_path, image_size=16)
    first = images[0][0]
    torch.manual_seed(99)
    assert torch.equal(images[0][0], first)
    assert not torch.equal(images[1][0], first)  # the same file in the next epoch
    assert not torch.equal(TrainingImages(tmp_path, image_size=16, seed=1)[0][0], first)


def _labels(images: Dataset[tuple[Tensor, int]], workers: int) -> list[int]:
    batches = iter(DataLoader(images, batch_size=4, num_workers=workers))
    try:
        return [int(label) for _, labels in batches for label in labels]
    finally:
        batches._shutdown_workers()  # type: ignore[attr-defined]  # else the traceback of an error keeps them


def test_workers_skip_and_count_together(tmp_path: Path, write_images: WriteImages) -> None:
    folder = write_images(tmp_path / "a", 16)
    for number in (1, 5, 10):
        (folder / f"{number:03}.jpg").write_bytes(b"")
    evaluation, training = EvaluationImages(tmp_path, image_size=8), TrainingImages(tmp_path, image_size=8)
    assert [index for index, label in enumerate(_labels(evaluation, 2)) if label == -100] == [1, 5, 10]
    assert len(evaluation.unreadable) == 3  # counted in the workers, seen here
    assert _labels(training, 2) == [0] * 16
    assert _labels(evaluation, 2).count(-100) == 3  # a second epoch counts nothing twice
    assert len(evaluation.unreadable) == 3


_SCRIPT = """
import sys
from torch.utils.data import DataLoader
from azureml_strategy.data import EvaluationImages
for _ in DataLoader(EvaluationImages(sys.argv[1], image_size=8), batch_size=2, num_workers=2):
    pass
"""


def test_a_worker_names_the_image_where_the_user_sees_it(tmp_path: Path, write_images: WriteImages) -> None:
    folder = write_images(tmp_path / "a", 6)
    (folder / "003.jpg").write_bytes(b"")
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
    assert run.stderr.count(f"Skipped an unreadable image: {folder}/003.jpg (UnidentifiedImageError") == 1


def test_substitutes_do_not_depend_on_the_workers(tmp_path: Path, write_images: WriteImages) -> None:
    folder = write_images(tmp_path / "a", 12)
    for number in range(6):
        (folder / f"{number:03}.jpg").write_bytes(b"")

    def epoch(workers: int) -> Tensor:
        loader = DataLoader(TrainingImages(tmp_path, image_size=8), batch_size=4, num_workers=workers)
        return torch.cat([images for images, _ in loader])

    with pytest.warns(RuntimeWarning, match="Skipped"):
        expected = epoch(0)
    assert torch.equal(epoch(2), expected)


@pytest.mark.parametrize("kind", [EvaluationImages, TrainingImages])
@pytest.mark.timeout(200)
def test_too_many_end_the_run_and_no_worker_hangs(
    tmp_path: Path, write_images: WriteImages, kind: type[EvaluationImages] | type[TrainingImages]
) -> None:
    folder = write_images(tmp_path / "a", 12)
    for number in range(8):
        (folder / f"{number:03}.jpg").write_text("no image")
    images = kind(tmp_path, image_size=8, max_unreadable=3)
    with pytest.raises(UnreadableImagesError, match=r"of 12 images cannot be read, and max_unreadable=3.*a/00\d\.jpg"):
        _labels(images, 2)


@pytest.mark.timeout(200)
def test_a_set_without_one_readable_image_is_an_error(tmp_path: Path, write_images: WriteImages) -> None:
    folder = write_images(tmp_path / "a", 2)
    for path in folder.iterdir():
        path.write_bytes(b"")
    for images in (EvaluationImages(tmp_path, image_size=8), TrainingImages(tmp_path, image_size=8)):
        with pytest.raises(UnreadableImagesError, match="2 of 2 images cannot be read"):
            _labels(images, 1)
