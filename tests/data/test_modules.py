"""The data module in a real Trainer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from tests.data.tar_sets import write_set
from torch import Tensor

from azureml_strategy.data import DataFolderError, ImageFolderDataModule

WriteImages = Callable[[Path, int], Path]


@pytest.fixture
def root(tmp_path: Path, write_images: WriteImages) -> Path:
    for part, count in (("train", 10), ("val", 5)):
        for name in ("a", "b"):
            write_images(tmp_path / part / name, count)
    return tmp_path


class _Record(LightningModule):
    """Notes each batch: the numbers of its files and its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[str, int, list[int]]] = []

    def _note(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        assert images.dtype == torch.uint8
        numbers = (images.float().mean(dim=(1, 2, 3)) / 10).round().int() + 100 * labels
        self.seen.append((stage, self.current_epoch, numbers.tolist()))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self._note("train", batch)
        return self.weight * 1.0

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._note("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._note("test", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def epoch(self, stage: str, epoch: int) -> list[int]:
        return [number for where, when, numbers in self.seen if (where, when) == (stage, epoch) for number in numbers]


def _trainer(**arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(
        accelerator="cpu", devices=1, num_sanity_val_steps=0, enable_model_summary=False, **quiet, **arguments
    )


def _module(root: Path, **arguments: Any) -> ImageFolderDataModule:
    return ImageFolderDataModule(root, **{"image_size": 8, "batch_size": 4, "num_workers": 0, **arguments})


_TRAIN = sorted([*range(10), *range(100, 110)])
_VAL = [*range(5), *range(100, 105)]


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_are_whole_and_shuffled_anew(root: Path, workers: int) -> None:
    record = _Record()
    _trainer(max_epochs=2).fit(record, datamodule=_module(root, num_workers=workers))
    first, second = record.epoch("train", 0), record.epoch("train", 1)
    assert sorted(first) == sorted(second) == _TRAIN
    assert first != second
    assert record.epoch("val", 0) == record.epoch("val", 1) == _VAL


def test_the_order_is_that_of_the_seed_whatever_the_workers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def order(seed: int, workers: int) -> list[tuple[str, int, list[int]]]:
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        record = _Record()
        _trainer(max_epochs=2).fit(record, datamodule=_module(root, num_workers=workers))
        return record.seen

    assert order(3, 0) == order(3, 2)
    assert order(3, 0) != order(4, 0)


def test_the_test_set_is_the_validation_set(root: Path) -> None:
    record = _Record()
    module = _module(root)
    _trainer().test(record, datamodule=module, verbose=False)
    assert record.epoch("test", 0) == _VAL
    assert [len(numbers) for _, _, numbers in record.seen] == [4, 4, 2]
    assert module.num_classes == 2


def test_an_input_of_the_job_is_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_ML_INPUT_images", str(root))
    module = ImageFolderDataModule(input_name="images")
    module.setup("validate")
    assert module.num_classes == 2


def test_fewer_images_than_a_global_batch_is_an_error(root: Path) -> None:
    with pytest.raises(ValueError, match=r"train has 20 images, fewer than one global batch: batch_size=21.*size=20"):
        _trainer(max_epochs=1).fit(_Record(), datamodule=_module(root, batch_size=21))


def test_a_missing_folder_is_named(root: Path) -> None:
    with pytest.raises(DataFolderError, match=f"{root}/valid"):
        _trainer(max_epochs=1).fit(_Record(), datamodule=_module(root, val_folder="valid"))


def test_folders_of_different_classes_are_refused(root: Path, write_images: WriteImages) -> None:
    write_images(root / "val" / "c", 1)
    with pytest.raises(DataFolderError, match=r"train has 2 class folders and .*val has 3; only in one of them: c\."):
        _module(root).setup("fit")


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_testing_alone_compares_the_classes_with_training_too(
    root: Path, write_images: WriteImages, stage: str
) -> None:
    write_images(root / "train" / "aa", 1)
    with pytest.raises(DataFolderError, match=r"train has 3 class folders and .*val has 2; only in one of them: aa\."):
        _module(root).setup(stage)
    for folder, classes in (("train", ["a", "b", "c"]), ("val", ["a", "c"])):
        samples = [(f"{number}.jpg", b"x", number) for number in range(2)]
        write_set(root / "packed" / folder, [samples], classes)
    with pytest.raises(DataFolderError, match=r"train has 3 class folders and .*val has 2; only in one of them: b\."):
        _module(root / "packed").setup(stage)
    shutil.rmtree(root / "packed" / "train")
    shutil.rmtree(root / "train")
    for place in (root, root / "packed"):
        module = _module(place)
        module.setup(stage)
        assert module.num_classes == 2, "where there is no training set, there is nothing to compare with"


@pytest.mark.timeout(200)
def test_an_error_in_a_worker_ends_the_run(root: Path) -> None:
    for path in (root / "train" / "a").iterdir():
        path.write_bytes(b"")
    with pytest.raises(Exception, match="max_unreadable=2"):
        _trainer(max_epochs=1).fit(_Record(), datamodule=_module(root, num_workers=2, max_unreadable=2))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("image_size", 0),
        ("num_workers", -1),
        ("max_unreadable", -1),
        ("minimum_scale", 0.0),
        ("evaluation_centre", 1.1),
    ],
)
def test_arguments_are_checked_at_once(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}, but it must be"):
        ImageFolderDataModule("/somewhere", **{name: value})


def test_loaders_keep_their_workers_and_pin_only_for_a_gpu(root: Path) -> None:
    module = _module(root, num_workers=2)
    module.setup("fit")
    train, val = module.train_dataloader(), module.val_dataloader()
    assert (train.persistent_workers, train.drop_last, val.drop_last) == (True, True, False)
    assert train.timeout > 0
    assert not train.pin_memory
    assert module.train_dataloader().batch_size == 4
