"""Batches in one piece, by real workers, from any source of records, and a training on them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from numpy.typing import NDArray
from tests.data.photographs import encode, numpy_file, photograph
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from azureml_strategy.data import (
    DigitsDataModule,
    EvaluationImages,
    ResumableLoader,
    TrainingImages,
    TrainingSampler,
    UnreadableImagesError,
)
from azureml_strategy.data.images import ImageBatch, collate_images
from azureml_strategy.models import ImageClassifier

WriteImages = Callable[[Path, int], Path]


class _Records:
    """A source in memory, which remembers what it was asked for."""

    classes = ("even", "odd")

    def __init__(self, records: Sequence[bytes | Exception]) -> None:
        self.records = records
        self.labels = np.arange(len(records), dtype=np.int32) % 2
        self.asked: list[list[int]] = []
        self.expected: list[list[int]] = []
        self.positions: list[int] = []
        self.closed = False

    def __len__(self) -> int:
        return len(self.records)

    def name(self, number: int) -> str:
        return f"shard-0.tar#{number}"

    def read(self, numbers: Sequence[int]) -> list[bytes | Exception]:
        self.asked.append(list(numbers))
        return [self.records[number] for number in numbers]

    def expect(self, numbers: NDArray[np.int64], following: NDArray[np.int64]) -> None:
        self.expected = [numbers.tolist(), following.tolist()]

    def reached(self, position: int) -> None:
        self.positions.append(position)

    def close(self) -> None:
        self.closed = True


def _records(count: int, kind: str = "jpeg") -> _Records:
    images = [photograph(60, 45, seed) for seed in range(count)]
    return _Records([numpy_file(np.asarray(each)) if kind == "raw" else encode(each) for each in images])


@pytest.mark.parametrize("kind", [TrainingImages, EvaluationImages])
def test_an_iteration_ends_after_the_last_image(kind: type[TrainingImages | EvaluationImages]) -> None:
    images = kind(_records(5), image_size=8)
    assert [label for _, label in images] == [0, 1, 0, 1, 0]


def _print_warning(message: Warning | str, *details: Any) -> None:
    print(message, file=sys.stderr, flush=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_epoch_by_plain_indices_is_warned_of_once(workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(TrainingImages(_records(6), image_size=8), batch_size=2, shuffle=True, num_workers=workers)
    seen = [list(loader)]
    assert "drawn a second time" not in capfd.readouterr().err
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = _print_warning  # pytest's collects those of this process alone
        seen += [list(loader), list(loader)]
    told = capfd.readouterr().err
    assert told.count("drawn a second time as a draw of epoch 0") == 1
    assert "TrainingSampler(images, num_replicas=1" in told


def test_epochs_of_a_training_sampler_are_no_second_draws() -> None:
    images = TrainingImages(_records(6), image_size=8)
    sampler = TrainingSampler(images, num_replicas=1, rank=0, seed=0)
    loader = ResumableLoader(images, sampler=sampler, batch_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in (0, 1, 0):  # a second fit begins at 0 again
            sampler.set_epoch(epoch)
            assert len(list(loader)) == 3


@pytest.mark.parametrize(
    ("workers", "context"), [(0, None), (2, "fork"), pytest.param(1, "spawn", marks=pytest.mark.exhaustive)]
)
def test_a_batch_arrives_in_channels_last_as_it_was_decoded(workers: int, context: str | None) -> None:
    images = TrainingImages(_records(10), image_size=32)
    loader = DataLoader(
        images,
        batch_size=4,
        num_workers=workers,
        collate_fn=collate_images,
        multiprocessing_context=context,
    )
    batches = list(loader)
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    for number, (pixels, labels) in enumerate(batches):
        assert pixels.is_contiguous(memory_format=torch.channels_last)
        assert pixels.stride() == (32 * 32 * 3, 1, 32 * 3, 3)
        assert (pixels.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert pixels.is_shared() == (workers > 0)
        for place, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            single, its_label = images[4 * number + place]
            assert torch.equal(image, single)
            assert label == its_label == (4 * number + place) % 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_and_a_subset_give_the_same(workers: int) -> None:
    images = EvaluationImages(_records(6), image_size=16)
    expected = torch.stack([images[index][0] for index in range(6)])
    (plain,) = DataLoader(images, batch_size=6, num_workers=workers)
    (part,) = DataLoader(Subset(images, [4, 2]), batch_size=2, num_workers=workers, collate_fn=collate_images)
    (one_by_one,) = [torch.stack([image for image, _ in DataLoader(images, batch_size=None, num_workers=workers)])]
    assert torch.equal(plain[0], expected)
    assert plain[1].tolist() == [0, 1] * 3
    assert torch.equal(part[0], expected[[4, 2]])
    assert torch.equal(one_by_one, expected)


def test_a_batch_is_a_sequence_of_its_samples() -> None:
    batch = TrainingImages(_records(3), image_size=8).__getitems__([2, 1])
    assert isinstance(batch, ImageBatch)
    assert [label for _, label in batch] == [0, 1]
    assert batch[1][0].shape == (3, 8, 8)
    assert collate_images([(torch.zeros(2), 1), (torch.ones(2), 2)])[1].tolist() == [1, 2]  # of another data set


def test_the_records_of_a_batch_are_read_at_once() -> None:
    source = _records(5)
    images = TrainingImages(source, image_size=8)
    images.__getitems__([3, 1, 7])
    assert source.asked == [[3, 1, 2]]
    source.asked.clear()
    images.__getitems__([0] * 150)  # but not so many that photographs would fill the memory
    assert [len(numbers) for numbers in source.asked] == [64, 64, 22]


@pytest.mark.parametrize("kind", ["jpeg", "raw"])
@pytest.mark.parametrize("split", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[5, 0], [7, 2, 1], [3], [6, 4]]])
def test_substitutes_depend_on_seed_and_draw_alone(kind: str, split: list[list[int]]) -> None:
    def damaged() -> _Records:
        source = _records(8, kind)
        source.records = [*source.records[:2], OSError("gone"), b"", source.records[4][:99], *source.records[5:]]  # type: ignore[index]
        return source

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one_by_one = TrainingImages(damaged(), image_size=16, seed=3)
        expected = [one_by_one[draw] for draw in range(8, 16)]
        images = TrainingImages(damaged(), image_size=16, seed=3)
        for places in split:
            for place, (image, label) in zip(places, images.__getitems__([8 + each for each in places]), strict=True):
                assert torch.equal(image, expected[place][0])
                assert label == expected[place][1]
    assert len(images.unreadable) == 3


def test_an_error_of_the_source_is_named_and_counted_once_in_a_batch() -> None:
    source = _records(4)
    source.records = [*source.records[:3], OSError("the record is damaged")]
    images = EvaluationImages(source, image_size=8)
    with pytest.warns(RuntimeWarning, match=r"shard-0\.tar#3 \(OSError: the record is damaged\)\. 1 of 4") as caught:
        batch = images.__getitems__([3, 0, 3, 4])
    assert sum("shard-0.tar#3" in str(each.message) for each in caught) == 1
    assert batch.labels.tolist() == [-100, 0, -100, -100]
    assert not batch.images[[0, 2, 3]].any()
    assert batch.images[1].any()


def test_what_was_decoded_before_an_error_does_not_stay() -> None:
    record = bytearray(encode(photograph(60, 45), "PNG"))
    images = EvaluationImages(_Records([encode(photograph(9, 9)), bytes(record[: len(record) * 2 // 3])]), image_size=8)
    with pytest.warns(RuntimeWarning, match="Skipped"):
        assert not images[1][0].any()


@pytest.mark.filterwarnings("ignore:Skipped")
def test_no_readable_record_is_an_error() -> None:
    images = TrainingImages(_Records([b"", OSError("gone"), b"text"]), image_size=8)
    with pytest.raises(UnreadableImagesError, match="3 of 3 images cannot be read"):
        images.__getitems__([0, 1, 2])


def test_what_comes_next_is_told_to_the_source_as_records() -> None:
    source = _records(5)
    training, evaluation = TrainingImages(source, image_size=8), EvaluationImages(source, image_size=8)
    training.expect(np.array([12, 10]), np.array([19, 15]))
    assert source.expected == [[2, 0], [4, 0]]
    evaluation.expect(np.array([0, 3, 5]), np.array([0, 3, 5]))  # the last is padding
    assert source.expected == [[0, 3], [0, 3]]
    training.reached(3)
    training.close()
    assert (source.positions, source.closed) == ([3], True)


@pytest.mark.parametrize("kind", ["jpeg", "raw"])
def test_a_window_shows_pixels_as_they_are(kind: str) -> None:
    source = _records(1, kind)
    whole = EvaluationImages(source, image_size=45, centre=1.0)[0][0]  # 45 of 60 columns, from the eighth
    images = TrainingImages(source, image_size=45, crop="window", flip=False)
    windows = [images[draw][0] for draw in range(16)]
    assert len({window.numpy().tobytes() for window in windows}) > 4
    if kind == "raw":
        assert any(torch.equal(window, whole) for window in [images[draw][0] for draw in range(200)])
    assert TrainingImages(source, image_size=64, crop="window")[0][0].shape == (3, 64, 64)  # scaled up


def test_arguments_are_checked(tmp_path: Path, write_images: WriteImages) -> None:
    write_images(tmp_path / "a", 2)
    with pytest.raises(ValueError, match="crop='whole', but it must be resized or window"):
        TrainingImages(tmp_path, crop="whole")
    with pytest.raises(ValueError, match="decoder='gpu', but it must be"):
        EvaluationImages(tmp_path, decoder="gpu")
    with pytest.raises(TypeError, match="come from _Records, which has no class folders"):
        _ = TrainingImages(_records(1)).folders
    assert TrainingImages(tmp_path).folders.root == str(tmp_path)


class _Digits(DigitsDataModule):
    def __init__(self, root: Path, decoder: str) -> None:
        super().__init__(root, image_size=24, batch_size=64)
        self._decoder = decoder

    def setup(self, stage: str) -> None:
        super().setup(stage)
        assert self._train is not None
        assert self._val is not None
        part = {"image_size": 24, "decoder": self._decoder}
        self._train = TrainingImages(self.root / "train", minimum_scale=0.7, flip=False, **part)  # type: ignore[arg-type]
        self._val = EvaluationImages(self.root / "val", centre=1.0, **part)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_training_learns_as_much_from_either_decoder(tmp_path: Path) -> None:
    def accuracy(decoder: str) -> Any:
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(800, 10)
        )
        trainer = Trainer(
            accelerator="cpu", max_epochs=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        model = ImageClassifier(network, learning_rate=0.2, warmup_epochs=1)
        trainer.fit(model, datamodule=_Digits(tmp_path, decoder))
        return trainer.callback_metrics["val/top1"].item()

    pillow, simplejpeg = accuracy("pillow"), accuracy("simplejpeg")
    assert pillow > 0.9
    # Of 359 digits; trainings of other seeds differ by as much.
    assert simplejpeg == pytest.approx(pillow, abs=0.025)


def test_the_batch_of_a_data_module_reaches_the_training_in_one_piece(tmp_path: Path) -> None:
    module = DigitsDataModule(tmp_path, batch_size=8, num_workers=1)
    module.prepare_data()
    module.setup("fit")
    for loader in (module.train_dataloader(), module.val_dataloader()):
        pixels: Tensor = next(iter(loader))[0]
        assert pixels.is_contiguous(memory_format=torch.channels_last)
