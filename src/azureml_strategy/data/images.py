"""Image data sets for training and evaluation: decoding, cropping, and counting of unreadable images."""

from __future__ import annotations

import math
import os
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from azureml_strategy.data.folders import scan_class_folders

_NAMED = 5

# The content decides the format, not the file name. Pillow's other decoders are never offered a file.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
# Aspect ratios of random crops: Szegedy et al. 2014, section 6 (https://arxiv.org/abs/1409.4842).
_ASPECT_RATIOS = (3 / 4, 4 / 3)
_ATTEMPTS = 10
# The label that torch's cross_entropy ignores.
IGNORED_LABEL = -100


class UnreadableImagesError(RuntimeError):
    """More images are unreadable than allowed, or all of them are."""


class UnreadableImages:
    """Tracks which images of a data set could not be read.

    The marks lie in shared memory, so the worker processes of a DataLoader and the process that started them see the
    same ones. An image counts once, however many epochs and workers meet it.

    Args:
        total: number of images.
        maximum: how many may be unreadable before it is an error.
        path: maps the index of an image to its path.
    """

    def __init__(self, total: int, maximum: int, path: Callable[[int], str]) -> None:
        self._marks: Tensor = torch.zeros(total, dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]
        self._maximum = maximum
        self._path = path

    def __contains__(self, index: int) -> bool:
        return bool(self._marks[index])

    def __len__(self) -> int:
        return int(self._marks.sum())

    def add(self, index: int, error: Exception) -> None:
        """Count an image, and warn with its path and the reason.

        Raises:
            UnreadableImagesError: more than `maximum` images are unreadable, or all of them.
        """
        self._marks[index] = True
        reason = f"{type(error).__name__}: {error}"
        count, total = len(self), len(self._marks)
        if count > self._maximum or count == total:
            raise UnreadableImagesError(self._complaint(count, total, reason)) from error
        warnings.warn(
            f"Skipped an unreadable image: {self._path(index)} ({reason}). "
            f"{count} of {total} so far, max_unreadable={self._maximum}.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _complaint(self, count: int, total: int, reason: str) -> str:
        first = [self._path(int(index)) for index in self._marks.nonzero()[:_NAMED]]
        return (
            f"{count} of {total} images cannot be read, and max_unreadable={self._maximum}. The first of them: "
            f"{', '.join(first)}. The last reason: {reason}. Check that the data was copied or mounted completely "
            "and may be read by this user; delete or repair these files, or allow more: data.max_unreadable=..."
        )


def decode_image(path: str, size: int, choose_crop: Callable[[int, int], Crop]) -> Tensor:
    """Read a crop of an image file, resized to a square.

    If the crop allows it, a JPEG is decoded at a half, a quarter or an eighth of its size, which costs correspondingly
    less. Greyscale, palette, CMYK, transparent and 16-bit images become RGB. EXIF rotation is ignored, as in the
    published results on ImageNet.

    Args:
        path: of the file.
        size: width and height of the result, pixels.
        choose_crop: maps width and height of the image, pixels, to the crop.

    Returns:
        uint8 `(3, size, size)`.

    Raises:
        Exception: of many types; Pillow has no common one for files that it cannot read.
    """
    with Image.open(path, formats=_FORMATS) as image:
        width, height = image.size
        crop = choose_crop(width, height)
        # Decode the smallest whole image in which the crop still has `size` pixels a side.
        image.draft(None, (math.ceil(size * width / crop.width), math.ceil(size * height / crop.height)))
        box = _scaled_box(crop, (width, height), image.size)
        square = _rgb(image).resize((size, size), Image.Resampling.BILINEAR, box=box)
    if crop.flip:
        square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


def _scaled_box(crop: Crop, seen: tuple[int, int], decoded: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of the crop in the decoded image, which may be smaller than the original."""
    across, down = decoded[0] / seen[0], decoded[1] / seen[1]
    # Rounding must not push an edge out of the image: Pillow refuses that.
    right = min((crop.left + crop.width) * across, decoded[0])
    bottom = min((crop.top + crop.height) * down, decoded[1])
    return crop.left * across, crop.top * down, right, bottom


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits a pixel; Pillow's conversion would clip them at 255
        image = image.convert("I").point(lambda value: value * (1 / 257)).convert("L")
    return image if image.mode == "RGB" else image.convert("RGB")


class Crop(NamedTuple):
    """A rectangle of an image, in its pixels, and whether to mirror it."""

    left: float
    top: float
    width: float
    height: float
    flip: bool = False


def random_crop(width: int, height: int, minimum_scale: float, flip: bool, rng: random.Random) -> Crop:
    """Return a crop of random area and aspect ratio, as torchvision's RandomResizedCrop, mirrored half the time.

    Args:
        width: of the image, pixels.
        height: of the image, pixels.
        minimum_scale: the smallest share of the image's area, above 0 and up to 1; 0.08 for ImageNet.
        flip: whether to mirror at all.
        rng: source of randomness.

    Returns:
        A crop within the image. If none of ten attempts fits, as in an extremely long image, it is the largest centred
        crop of an allowed aspect ratio.
    """
    mirrored = flip and rng.random() < 0.5
    for _ in range(_ATTEMPTS):
        area = width * height * rng.uniform(minimum_scale, 1.0)
        ratio = math.exp(rng.uniform(math.log(_ASPECT_RATIOS[0]), math.log(_ASPECT_RATIOS[1])))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left, top = rng.randint(0, width - crop_width), rng.randint(0, height - crop_height)
            return Crop(left, top, crop_width, crop_height, mirrored)
    widest, tallest = min(width, height * _ASPECT_RATIOS[1]), min(height, width / _ASPECT_RATIOS[0])
    return _centred(width, height, widest, tallest)._replace(flip=mirrored)


def centre_crop(width: int, height: int, share: float) -> Crop:
    """Return a square in the centre of an image.

    Args:
        width: of the image, pixels.
        height: of the image, pixels.
        share: side of the square divided by the image's shorter side. 0.875 is the usual evaluation on ImageNet: resize
            the shorter side to 256 pixels, then cut out 224.
    """
    side = min(width, height) * share
    return _centred(width, height, side, side)


def _centred(width: int, height: int, crop_width: float, crop_height: float) -> Crop:
    return Crop((width - crop_width) / 2, (height - crop_height) / 2, crop_width, crop_height)


class ImageFolder(Dataset[tuple[Tensor, int]], ABC):
    """Images in class folders, decoded on access.

    Args:
        root: the folder that holds the class folders: `root/class/image.jpg`.
        image_size: width and height of the images returned, pixels.
        max_unreadable: how many images may be unreadable before it is an error; each process counts its own.

    Raises:
        DataFolderError: the folder is missing, or has no class folders or no images.
    """

    def __init__(self, root: str | os.PathLike[str], image_size: int, max_unreadable: int) -> None:
        self.folders = scan_class_folders(root)
        self.image_size = image_size
        self.unreadable = UnreadableImages(len(self), max_unreadable, self.folders.path)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; the index of a class is its label."""
        return self.folders.classes

    def __len__(self) -> int:
        return len(self.folders.names)

    @abstractmethod
    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image, uint8 `(3, image_size, image_size)`, and its label."""

    @abstractmethod
    def crop(self, width: int, height: int, draw: int) -> Crop:
        """Return the part of an image to use. Width and height are the image's, in pixels."""

    def read(self, index: int, draw: int) -> tuple[Tensor, int] | None:
        """Return the image and its label, or None if the image cannot be read, which is counted.

        Raises:
            UnreadableImagesError: more than `max_unreadable` images cannot be read.
        """
        if index in self.unreadable:
            return None
        try:
            path = self.folders.path(index)
            image = decode_image(path, self.image_size, lambda width, height: self.crop(width, height, draw))
        except Exception as error:  # Pillow's decoders raise anything: OSError, SyntaxError, struct.error, ...
            self.unreadable.add(index, error)
            return None
        return image, int(self.folders.labels[index])


class TrainingImages(ImageFolder):
    """Randomly cropped and mirrored images. Another image replaces an unreadable one.

    Randomness depends only on the seed and the draw, not on the number of workers or processes, nor on whether the run
    was interrupted. Ranks that share a replica therefore read the same.

    Args:
        root: the folder that holds the class folders: `root/class/image.jpg`.
        image_size: width and height of the images returned, pixels.
        max_unreadable: how many images may be unreadable before it is an error.
        minimum_scale: the smallest share of an image's area that a crop may have.
        flip: mirror half of the images.
        seed: of crops, mirroring and substitutes.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        image_size: int = 224,
        max_unreadable: int = 100,
        minimum_scale: float = 0.08,
        flip: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(root, image_size, max_unreadable)
        self.minimum_scale = minimum_scale
        self.flip = flip
        self.seed = seed

    @override
    def __getitem__(self, draw: int) -> tuple[Tensor, int]:
        """Return an image and its label.

        Args:
            draw: `epoch * len(self) + index`, as `TrainingSampler` counts, so that an image is cropped differently in
                each epoch. A plain index is a draw of epoch 0.
        """
        sample = self.read(draw % len(self), draw)
        substitutes = random.Random(f"{self.seed}/{draw}/substitutes")
        while sample is None:  # terminates: `read` raises once no image can be read
            sample = self.read(substitutes.randrange(len(self)), draw)
        return sample

    @override
    def crop(self, width: int, height: int, draw: int) -> Crop:
        rng = random.Random(f"{self.seed}/{draw}")
        return random_crop(width, height, self.minimum_scale, self.flip, rng)


class EvaluationImages(ImageFolder):
    """The centres of the images. A blank image with the label -100 replaces an unreadable one.

    Args:
        root: the folder that holds the class folders: `root/class/image.jpg`.
        image_size: width and height of the images returned, pixels.
        max_unreadable: how many images may be unreadable before it is an error.
        centre: side of the evaluated square divided by the image's shorter side.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        image_size: int = 224,
        max_unreadable: int = 100,
        centre: float = 0.875,
    ) -> None:
        super().__init__(root, image_size, max_unreadable)
        self.centre = centre

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image and its label, or a blank image for `index == len(self)`, with which samplers pad."""
        sample = self.read(index, draw=index) if index < len(self) else None
        return sample or (torch.zeros(3, self.image_size, self.image_size, dtype=torch.uint8), IGNORED_LABEL)

    @override
    def crop(self, width: int, height: int, draw: int) -> Crop:
        return centre_crop(width, height, self.centre)
