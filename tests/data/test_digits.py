"""scikit-learn's digits as files."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from azureml_strategy.data import DigitsDataModule
from azureml_strategy.data.digits import write_digits
from azureml_strategy.data.folders import DataFolderError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "validation-0.2"
    write_digits(folder, 0.2)
    return folder


def test_every_digit_is_written_once_under_its_label(folder: Path) -> None:
    files = {int(path.stem): path for path in folder.glob("*/*/*.jpg")}
    digits = load_digits()
    assert sorted(files) == list(range(1797))
    assert [int(files[number].parent.name) for number in range(1797)] == digits.target.tolist()
    assert len(list(folder.glob("val/*/*.jpg"))) == round(0.2 * 1797)
    image = Image.open(files[5])
    assert (image.format, image.size) == ("JPEG", (32, 32))
    small = np.asarray(image.resize((8, 8), Image.Resampling.BOX), dtype=float) / 255 * 16
    assert np.corrcoef(small.ravel(), digits.images[5].ravel())[0, 1] > 0.97


def test_they_are_read_like_any_image_set(folder: Path) -> None:
    module = DigitsDataModule(folder.parent, batch_size=64)
    module.prepare_data()
    module.setup("fit")
    images, labels = next(iter(module.train_dataloader()))
    assert images.shape == (64, 3, 32, 32)
    assert module.num_classes == 10
    assert len(set(labels.tolist())) > 5
    assert sum(len(labels) for _, labels in module.val_dataloader()) == 359


def test_from_shards_they_are_the_same_digits(folder: Path) -> None:
    def read(module: DigitsDataModule) -> Counter[tuple[bytes, int]]:
        module.prepare_data()
        module.setup("validate")
        batches = module.val_dataloader()
        return Counter(
            (image.contiguous().numpy().tobytes(), int(label))
            for images, labels in batches
            for image, label in zip(images, labels, strict=True)
        )

    packed = DigitsDataModule(folder.parent, shards=True)
    assert read(packed) == read(DigitsDataModule(folder.parent))
    shards = list((folder.with_name("validation-0.2-shards") / "train").glob("*.tar"))
    assert len(shards) > 3, "enough for a window of some"
    written = shards[0].stat().st_mtime_ns
    packed.prepare_data()
    assert shards[0].stat().st_mtime_ns == written
    assert not list(folder.parent.glob(".digits-*"))


def test_they_are_written_once(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    write_digits(folder, 0.2)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_processes_that_write_at_once_leave_one_whole_set(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "digits"
    processes = [multiprocessing.Process(target=write_digits, args=(folder, 0.1)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list(folder.glob("*/*/*.jpg"))) == 1797
    assert list(folder.parent.iterdir()) == [folder]


def test_what_a_killed_process_left_is_not_used(tmp_path: Path) -> None:
    half = tmp_path / ".digits-killed" / "digits" / "train" / "0"
    half.mkdir(parents=True)
    write_digits(tmp_path / "digits", 0.1)
    assert len(list((tmp_path / "digits").glob("*/*/*.jpg"))) == 1797


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "digits").touch()
    with pytest.raises(NotADirectoryError):
        write_digits(tmp_path / "digits", 0.1)
    assert list(tmp_path.iterdir()) == [tmp_path / "digits"]


def test_where_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert DigitsDataModule().root == tmp_path / "cache" / "azureml_strategy" / "digits" / "validation-0.2"
    (tmp_path / "empty").mkdir()
    assert DigitsDataModule(tmp_path / "empty").root == tmp_path / "empty" / "validation-0.2"
    (tmp_path / "flowers" / "train").mkdir(parents=True)
    for root, words in (("nope", "is no folder that there is"), ("flowers", "holds train and is no folder of digits")):
        with pytest.raises(DataFolderError, match=rf"{root}, which {words}\. Leave data\.root out"):
            DigitsDataModule(tmp_path / root)
    assert not (tmp_path / "nope").exists()


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_the_fraction_is_checked(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"validation_fraction=.*between 0 and 1"):
        DigitsDataModule(validation_fraction=fraction)
