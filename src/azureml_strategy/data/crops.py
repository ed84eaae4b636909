"""The parts of images that a training and an evaluation look at."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

# Aspect ratios of random crops: Szegedy et al. 2014, section 6 (https://arxiv.org/abs/1409.4842).
_ASPECT_RATIOS = (3 / 4, 4 / 3)
_ATTEMPTS = 10


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


def window_crop(width: int, height: int, size: int, flip: bool, rng: random.Random) -> Crop:
    """Return a random square of an image's own pixels, mirrored half the time: for images that are small already.

    Args:
        width: of the image, pixels.
        height: of the image, pixels.
        size: side of the square, pixels. In an image whose shorter side is less, the square has that side.
        flip: whether to mirror at all.
        rng: source of randomness.
    """
    mirrored = flip and rng.random() < 0.5
    side = min(size, width, height)
    return Crop(rng.randint(0, width - side), rng.randint(0, height - side), side, side, mirrored)


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
