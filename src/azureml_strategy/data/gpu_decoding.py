"""Decodes JPEGs on the GPU, by nvJPEG through torchcodec.

NOT RUN on a GPU so far (docs/gpu.md). What runs without one is tested: the packing of batches, cropping and
resizing, and the refusals. torchcodec's part follows its documentation of `torchcodec.decoders.decode_jpeg`, 0.16.

A worker only reads records and chooses crops. nvJPEG takes whole JPEGs of one or three colours. The worker decodes all
other records itself, with substitutes for what is unreadable. In a recipe:

    data._target_=azureml_strategy.data.NvjpegDataModule

Unlike on the CPU, a crop is moved to whole pixels, and an error of nvJPEG ends the run: it names no image.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset
from typing_extensions import override

from azureml_strategy.data.decoding import Crop
from azureml_strategy.data.images import ImageFolder
from azureml_strategy.data.modules import ImageFolderDataModule
from azureml_strategy.data.pillow_images import JPEG
from azureml_strategy.lazy import require_library

_OLDEST = (0, 16)  # of torchcodec: the first with images


class EncodedBatch:
    """The JPEGs of a batch in one buffer. Lightning leaves it on the CPU, as it moves tensors only;
    torchcodec wants it there.

    Args:
        records: the files.
        crops: what to cut out of each, in its pixels.
        places: the place of each in the batch.
        images: uint8 `(N, 3, size, size)` in channels_last, with the images that are decoded already.
        labels: int64 `(N,)`.
    """

    def __init__(
        self, records: Sequence[bytes], crops: list[Crop], places: list[int], images: Tensor, labels: Tensor
    ) -> None:
        self.encoded = torch.from_numpy(np.frombuffer(bytearray(b"".join(records)), dtype=np.uint8))
        self.lengths = [len(record) for record in records]
        self.crops, self.places, self.images, self.labels = crops, places, images, labels

    def pin_memory(self) -> EncodedBatch:
        """Move what travels to the GPU into pinned memory; torch's DataLoader calls it."""
        for name in ("encoded", "images", "labels"):
            setattr(self, name, getattr(self, name).pin_memory())
        return self


def _identity(batch: Any) -> Any:
    return batch


class NvjpegDataModule(ImageFolderDataModule):
    """Images in class folders or packed, whose JPEGs the GPU decodes. Arguments are those of `ImageFolderDataModule`.

    A LightningModule's own `on_after_batch_transfer` is not called: Lightning calls the data module's instead.
    """

    @property
    @override
    def collate(self) -> Callable[[Any], Any]:
        return _identity

    @override
    def setup(self, stage: str) -> None:
        """List the images, once.

        Raises:
            RuntimeError: the training runs on no NVIDIA GPU, or torchcodec is missing or too old.
        """
        if self.trainer is not None:
            _require_gpu(self.trainer.strategy.root_device)
        super().setup(stage)

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Decode a batch."""
        assert self.trainer is not None
        return decode_on_gpu(batch, self.trainer.strategy.root_device) if isinstance(batch, EncodedBatch) else batch

    @override
    def loaded(self, images: ImageFolder) -> Dataset[Any]:
        return EncodedImages(images)


class EncodedImages(Dataset[EncodedBatch]):
    """The images of `TrainingImages` or `EvaluationImages` as batches to be decoded on the GPU."""

    def __init__(self, images: ImageFolder) -> None:
        self.images = images

    def expect(self, numbers: NDArray[np.int64], following: NDArray[np.int64]) -> None:
        """Tell the source which draws come in this pass, and in the next one."""
        self.images.expect(numbers, following)

    def reached(self, position: int) -> None:
        """Tell the source how many samples of the pass have been handed out."""
        self.images.reached(position)

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, draws: Sequence[int]) -> EncodedBatch:
        """Return a batch. What the GPU cannot decode is decoded here."""
        first = [next(self.images.candidates(draw), None) for draw in draws]
        present = {place: number for place, number in enumerate(first) if number is not None}
        records = dict(zip(present, self.images.source.read(list(present.values())), strict=True))
        sizes = {place: size for place, record in records.items() if (size := _size(record)) is not None}
        rest = [place for place in range(len(draws)) if place not in sizes]
        decoded = self.images.__getitems__([draws[place] for place in rest])
        images = decoded.images.new_zeros(len(draws), *decoded.images.permute(0, 2, 3, 1).shape[1:]).permute(0, 3, 1, 2)
        labels = decoded.labels.new_zeros(len(draws))
        images[rest], labels[rest] = decoded.images, decoded.labels
        for place in sizes:
            labels[place] = int(self.images.source.labels[present[place]])
        crops = [self.images.crop(*size, draws[place]) for place, size in sizes.items()]
        files = [_without_exif(record) for place in sizes if isinstance(record := records[place], bytes)]
        return EncodedBatch(files, crops, list(sizes), images, labels)


def decode_on_gpu(batch: EncodedBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return images, uint8 `(N, 3, size, size)` in channels_last, and labels on the device.

    Raises:
        RuntimeError: it is no NVIDIA GPU, or torchcodec is missing or too old.
    """
    _require_gpu(device)
    from torchcodec.decoders import decode_jpeg

    images = batch.images.to(device, non_blocking=True)
    decoded = (
        decode_jpeg(list(torch.split(batch.encoded, batch.lengths)), mode="RGB", device=device) if batch.crops else []
    )
    for image, crop, place in zip(decoded, batch.crops, batch.places, strict=True):
        crop_and_resize(image, crop, images[place])
    return images, batch.labels.to(device, non_blocking=True)


def crop_and_resize(image: Tensor, crop: Crop, square: Tensor) -> None:
    """Write the crop of an image, uint8 `(3, height, width)`, to a square, uint8 `(3, size, size)`, on any device."""
    left, top = round(crop.left), round(crop.top)
    right, bottom = max(round(crop.left + crop.width), left + 1), max(round(crop.top + crop.height), top + 1)
    part = image[None, :, top:bottom, left:right].float()  # on a GPU, torch resizes no bytes
    resized = functional.interpolate(part, square.shape[1:], mode="bilinear", antialias=True)[0]
    square.copy_((resized.flip(-1) if crop.flip else resized).round_().clamp_(0, 255))


def _require_gpu(device: torch.device) -> None:
    require_library("simplejpeg")
    instead = "Leave decoder=auto, which decodes on the CPU."
    if device.type != "cuda" or torch.version.hip is not None:
        raise RuntimeError(f"nvJPEG decodes on an NVIDIA GPU, and the training runs on {device}. {instead}")
    version = importlib.metadata.version("torchcodec") if find_spec("torchcodec") is not None else None
    if version is None or tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise RuntimeError(
            f"Decoding on the GPU needs torchcodec 0.16 or newer, and {version or 'none'} is installed. Type: "
            f"pip install 'torchcodec>=0.16', in the version that belongs to torch {torch.__version__}. {instead}"
        )


def _size(record: bytes | Exception) -> tuple[int, int] | None:
    """Return width and height of a whole JPEG of one or three colours; None for another record."""
    import simplejpeg

    if isinstance(record, Exception) or not (record.startswith(JPEG) and record.endswith(b"\xff\xd9")):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(record)
    except ValueError:
        return None
    return (width, height) if colours in ("YCbCr", "Gray") else None


def _without_exif(record: bytes) -> bytes:
    """Return a JPEG without its EXIF data: torchcodec would turn the image by it."""
    place = 2
    while record[place : place + 2] not in (b"\xff\xda", b""):
        end = place + 2 + int.from_bytes(record[place + 2 : place + 4], "big")
        if record[place : place + 2] == b"\xff\xe1":
            record, end = record[:place] + record[end:], place
        place = end
    return record
