"""What decoding on the GPU does before and after it: it runs on a CPU. nvJPEG itself was never run."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from PIL import Image
from PIL.Image import Resampling
from tests.data.photographs import encode, photograph
from tests.data.test_image_batches import _Records
from torch.utils.data import DataLoader

from azureml_strategy.data import EvaluationImages, NvjpegDataModule, TrainingImages
from azureml_strategy.data.decoding import random_crop
from azureml_strategy.data.gpu_decoding import EncodedImages, crop_and_resize, decode_on_gpu


def _decoded(file: torch.Tensor) -> Image.Image:
    return Image.open(io.BytesIO(file.numpy().tobytes()))


def test_a_batch_holds_jpegs_and_what_the_worker_decoded_itself() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = photograph(60, 40)
    records = [
        encode(plain, exif=exif),
        encode(photograph(50, 40), "PNG"),
        encode(plain)[:-50],
        encode(plain.convert("L")),
        encode(plain.convert("CMYK")),
    ]
    encoded = EncodedImages(EvaluationImages(_Records(records), image_size=16))
    with pytest.warns(RuntimeWarning, match="1 of 5"):
        batch = encoded.__getitems__([0, 1, 2, 3, 4, 5])
    assert batch.places == [0, 3]
    assert batch.labels.tolist() == [0, 1, -100, 1, 0, -100]
    assert [bool(image.any()) for image in batch.images] == [False, True, False, False, True, False]
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    first, second = (_decoded(file) for file in batch.encoded.split(batch.lengths))
    assert not first.getexif()
    assert np.array_equal(np.asarray(first), np.asarray(Image.open(io.BytesIO(records[0]))))
    assert second.mode == "L"
    assert [(crop.left, crop.top, crop.width) for crop in batch.crops] == [(12.5, 2.5, 35), (12.5, 2.5, 35)]


def test_crops_and_labels_are_those_of_the_cpu() -> None:
    images = TrainingImages(_Records([encode(photograph(90, 70, seed)) for seed in range(4)]), image_size=32)
    (batch,) = DataLoader(EncodedImages(images), batch_size=4, num_workers=1, collate_fn=lambda batch: batch)
    expected = images.__getitems__(range(4))
    assert torch.equal(batch.labels, expected.labels)
    for file, crop, place in zip(batch.encoded.split(batch.lengths), batch.crops, batch.places, strict=True):
        pixels = torch.from_numpy(np.array(_decoded(file))).permute(2, 0, 1)
        crop_and_resize(pixels, crop, batch.images[place])
    assert (batch.images.int() - expected.images.int()).abs().max() <= 1


@pytest.mark.parametrize(("width", "height", "size"), [(500, 375, 224), (333, 251, 64), (120, 97, 224)])
def test_crops_are_resized_as_by_pillow(width: int, height: int, size: int) -> None:
    image = photograph(width, height)
    crop = random_crop(width, height, 0.3, True, random.Random(2))
    square = torch.empty(3, size, size, dtype=torch.uint8)
    crop_and_resize(torch.from_numpy(np.array(image)).permute(2, 0, 1), crop, square)
    part = image.crop((crop.left, crop.top, crop.left + crop.width, crop.top + crop.height))
    expected = np.asarray(part.resize((size, size), Resampling.BILINEAR))
    actual = square.permute(1, 2, 0).numpy().astype(int)
    assert np.abs(actual - (expected[:, ::-1] if crop.flip else expected)).max() <= 1


def test_a_machine_without_it_is_told() -> None:
    batch = EncodedImages(EvaluationImages(_Records([encode(photograph(20, 20))]), image_size=8)).__getitems__([0])
    with pytest.raises(RuntimeError, match=r"an NVIDIA GPU, and the training runs on cpu\. Leave decoder=auto"):
        decode_on_gpu(batch, torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"none is installed\. Type: pip install 'torchcod"):
        decode_on_gpu(batch, torch.device("cuda"))


def test_the_data_module_is_refused_before_training_where_there_is_no_gpu(
    tmp_path: Path, write_images: Callable[[Path, int], Path]
) -> None:
    for part in ("train", "val"):
        write_images(tmp_path / part / "a", 4)
    data = NvjpegDataModule(tmp_path, image_size=8, batch_size=2, num_workers=0)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False)
    with pytest.raises(RuntimeError, match=r"nvJPEG decodes on an NVIDIA GPU.*Leave decoder=auto"):
        trainer.fit(BoringModel(), datamodule=data)
    data.trainer = None
    data.setup("fit")
    (batch, _) = data.train_dataloader()
    assert len(batch.lengths) == 2, "workers hand over JPEGs"
