"""From an image file to a tensor of uint8."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from azureml_strategy.data.crops import Crop

# What is inside decides, whatever the name says; no other decoder of Pillow's is offered a file.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")


def decode_image(path: str, size: int, choose_crop: Callable[[int, int], Crop]) -> Tensor:
    """Read a crop of an image file, resized to a square.

    A JPEG is decoded at a half, a quarter or an eighth of its size where the crop allows, which costs that much
    less. Greyscale, palette, CMYK, transparent and 16-bit images become RGB; a rotation in EXIF is ignored, as in
    the published results on ImageNet.

    Args:
        path: of the file.
        size: width and height of the result, pixels.
        choose_crop: from width and height of the image, pixels, to the crop.

    Returns:
        uint8 `(3, size, size)`.

    Raises:
        Exception: of many types; Pillow has no common one for what it cannot read.
    """
    with Image.open(path, formats=_FORMATS) as image:
        width, height = image.size
        crop = choose_crop(width, height)
        # the smallest whole image in which the crop still has `size` pixels a side
        image.draft(None, (math.ceil(size * width / crop.width), math.ceil(size * height / crop.height)))
        box = _scaled_box(crop, (width, height), image.size)
        square = _rgb(image).resize((size, size), Image.Resampling.BILINEAR, box=box)
    if crop.flip:
        square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


def _scaled_box(crop: Crop, seen: tuple[int, int], decoded: tuple[int, int]) -> tuple[float, float, float, float]:
    """The crop's left, top, right and bottom in the image as decoded, which may be smaller than as seen."""
    across, down = decoded[0] / seen[0], decoded[1] / seen[1]
    # rounding must not push an edge out of the image, which Pillow refuses
    right = min((crop.left + crop.width) * across, decoded[0])
    bottom = min((crop.top + crop.height) * down, decoded[1])
    return crop.left * across, crop.top * down, right, bottom


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits a pixel; Pillow's conversion would clip them at 255
        image = image.convert("I").point(lambda value: value * (1 / 257)).convert("L")
    return image if image.mode == "RGB" else image.convert("RGB")
