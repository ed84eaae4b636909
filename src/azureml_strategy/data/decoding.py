"""Decodes images: from the bytes of a record to a crop of it, resized to a square."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from azureml_strategy.data.npy_files import NPY
from azureml_strategy.data.pillow_images import JPEG, START_OF_SCAN, is_huge, open_image, refuse_costly, to_rgb
from azureml_strategy.lazy import install_line

# Aspect ratios of random crops: Szegedy et al. 2014, section 6 (https://arxiv.org/abs/1409.4842).
_ASPECT_RATIOS = (3 / 4, 4 / 3)
_ATTEMPTS = 10

# Markers: https://www.w3.org/Graphics/JPEG/itu-t81.pdf, table B.1.
_START_OF_IMAGE, _END_OF_IMAGE = b"\xff\xd8", b"\xff\xd9"
_BASELINE, _EXTENDED = 0xC0, 0xC1
# Other ways to code an image, which spread a row over the file (progressive), or which are rare.
_OTHER_FRAMES = frozenset(range(0xC2, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Rows of the largest block of pixels that is coded as one. Fewer rows than this are not worth a copy of the file.
_BLOCK = 16
Pixels = NDArray[np.uint8]


class Crop(NamedTuple):
    """A rectangle of an image, in its pixels, and whether to mirror it."""

    left: float
    top: float
    width: float
    height: float
    flip: bool = False


def random_crop(width: int, height: int, minimum_scale: float, flip: bool, rng: random.Random) -> Crop:
    """Return a crop of random area and aspect ratio, as torchvision's RandomResizedCrop, mirrored half the time.

    The area is at least `minimum_scale` of the image's; 0.08 for ImageNet. If none of ten attempts fits into the image,
    as in an extremely long one, it is the largest centred crop of an allowed aspect ratio.
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
    """Return a random square of `size` pixels, mirrored half the time, for images that were resized before.

    In an image whose shorter side is less, the square has that side.
    """
    mirrored = flip and rng.random() < 0.5
    side = min(size, width, height)
    return Crop(rng.randint(0, width - side), rng.randint(0, height - side), side, side, mirrored)


def centre_crop(width: int, height: int, share: float) -> Crop:
    """Return a square in the centre of an image.

    `share` is its side divided by the image's shorter side. 0.875 is the usual evaluation on ImageNet: resize the
    shorter side to 256 pixels, then cut out 224.
    """
    side = min(width, height) * share
    return _centred(width, height, side, side)


def _centred(width: int, height: int, crop_width: float, crop_height: float) -> Crop:
    return Crop((width - crop_width) / 2, (height - crop_height) / 2, crop_width, crop_height)


def with_fewer_rows(record: bytes, rows: int) -> tuple[bytes | bytearray, int]:
    """Return a JPEG of at least the first rows of another one, and how many it has; -1 for a file that was not changed.

    Only the height in its header is changed. The decoder has to tolerate the pixels of the other rows (simplejpeg's
    `strict=False`), and so would decode a file that was cut off, too. Therefore a file that does not end as a JPEG does
    is not changed, and neither is one whose rows do not follow one another.
    """
    place = _place_of_height(record) if record.endswith(_END_OF_IMAGE) else None
    if place is None:
        return record, -1
    rows = -(-rows // _BLOCK) * _BLOCK
    if rows + _BLOCK > int.from_bytes(record[place : place + 2], "big"):
        return record, -1
    shorter = bytearray(record)
    shorter[place : place + 2] = rows.to_bytes(2, "big")
    return shorter, rows


def _place_of_height(record: bytes) -> int | None:
    """Return the position of the height in a JPEG whose rows follow one another; None for another file."""
    height = components = None
    place = len(_START_OF_IMAGE)
    while place + 10 < len(record) and record[place] == 0xFF:
        marker = record[place + 1]
        if marker in _OTHER_FRAMES:
            return None
        if marker in (_BASELINE, _EXTENDED):
            height, components = place + 5, record[place + 9]
        if marker == START_OF_SCAN:  # all components in one scan, or they follow one another
            return height if record[place + 4] == components else None
        place += 2 + int.from_bytes(record[place + 2 : place + 4], "big")
    return None


# Maps width and height of an image, in pixels, to the crop. It is called again if a decoder gives up on an image.
ChooseCrop = Callable[[int, int], Crop]
# Decodes a record into uint8 `(size, size, 3)`, RGB. Raises exceptions of many types: Pillow has no common one.
Decoder = Callable[[bytes, ChooseCrop, Pixels], None]
# Of simplejpeg's scales, n/8, only these are faster than the whole: libjpeg-turbo has vector code for them.
_REDUCTIONS = (8, 4, 2)
# A crop whose edges are less than this from whole pixels lies at whole pixels. Rounding errors are some 1e-13.
_WHOLE = 1e-6


def choose_decoder(name: str) -> Decoder:
    """Return a decoder by name: `pillow`, `simplejpeg`, or `auto`, which is simplejpeg if it is installed.

    simplejpeg is faster on JPEGs, and leaves all else to Pillow.

    Raises:
        ValueError: there is no such decoder.
        ModuleNotFoundError: simplejpeg is asked for and not installed.
    """
    if name not in ("auto", "pillow", "simplejpeg"):
        raise ValueError(f"decoder={name!r}, but it must be auto, pillow or simplejpeg.")
    if name == "pillow":
        return decode_pillow
    if find_spec("simplejpeg") is not None:
        return decode_simplejpeg
    if name == "auto":
        return decode_pillow
    raise ModuleNotFoundError(
        f"decoder='simplejpeg', but simplejpeg is not installed here. Type: {install_line('data')}, or "
        "leave decoder=auto, which does without.",
        name="simplejpeg",
    )


def decode_pillow(record: bytes, choose_crop: ChooseCrop, square: Pixels) -> None:
    """Decode a record by Pillow, or one of pixels by torch."""
    from PIL import Image

    if record.startswith(NPY):
        return decode_pixels(record, choose_crop, square)
    size = len(square)
    with open_image(record) as image:
        width, height = image.size
        crop = choose_crop(width, height)
        # Decode the smallest whole image in which the crop still has `size` pixels a side.
        image.draft(None, (math.ceil(size * width / crop.width), math.ceil(size * height / crop.height)))
        # The decoded image may be smaller than the original.
        across, down = image.width / width, image.height / height
        # Rounding must not push an edge out of the image: Pillow refuses that.
        right = min((crop.left + crop.width) * across, image.width)
        bottom = min((crop.top + crop.height) * down, image.height)
        box = (crop.left * across, crop.top * down, right, bottom)
        square[:] = np.asarray(to_rgb(image).resize((size, size), Image.Resampling.BILINEAR, box=box))
    if crop.flip:
        _mirror(square)
    return None


def decode_simplejpeg(record: bytes, choose_crop: ChooseCrop, square: Pixels) -> None:
    """Decode a record by simplejpeg, which is libjpeg-turbo, if it is a JPEG that simplejpeg takes; else by Pillow."""
    import simplejpeg

    if not record.startswith(JPEG):
        return decode_pillow(record, choose_crop, square)
    refuse_costly(record)
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(record)
        if is_huge(width, height):  # Pillow warns, or refuses what would fill the memory
            return decode_pillow(record, choose_crop, square)
        crop = choose_crop(width, height)
        reduction = _reduction(width, height, crop, len(square))
        # Resizing reaches beyond the crop, and colours, which are stored at a lower resolution, beyond their pixels.
        reach = math.ceil(crop.height / len(square)) + 3 * reduction
        shorter, rows = with_fewer_rows(record, math.ceil(crop.top + crop.height) + reach)
        pixels = simplejpeg.decode_jpeg(
            shorter,
            min_height=-(-(height if rows < 0 else rows) // reduction),
            min_width=-(-width // reduction),
            strict=rows < 0,
        )
    except ValueError:  # CMYK, or damaged: Pillow reads some of these files, and says what is wrong with the others
        return decode_pillow(record, choose_crop, square)
    # libjpeg makes a pixel of each square of `reduction` pixels, and one of the remainder at the right and lower edges.
    left, top, crop_width, crop_height = (side / reduction for side in crop[:4])
    _resize(pixels, Crop(left, top, crop_width, crop_height, crop.flip), square)
    return None


def decode_pixels(record: bytes, choose_crop: ChooseCrop, square: Pixels) -> None:
    """Decode a numpy file of pixels, uint8 `(height, width, 3)`. A crop that has the right size is only copied.

    Raises:
        ValueError: it is cut off, or holds something else.
    """
    begins = 10 + int.from_bytes(record[8:10], "little")
    height, width = _npy_size(record[:begins])
    if len(record) != begins + height * width * 3:
        raise ValueError(f"{len(record)} bytes, and pixels of {width} x {height} take {begins + height * width * 3}")
    pixels = np.frombuffer(record, np.uint8, offset=begins).reshape(height, width, 3)
    crop = choose_crop(width, height)
    if crop.width == crop.height == len(square):  # half a pixel to the side would only blur it
        crop = crop._replace(left=int(crop.left), top=int(crop.top))
    _resize(pixels, crop, square)


def resize_antialiased(pixels: Tensor, square: Tensor) -> None:
    """Resize images, `(N, 3, height, width)`, by triangles, as Pillow's BILINEAR, into `square`, `(N, 3, size, size)`.

    Bytes are fastest in channels_last.
    """
    # torch.nn.functional.interpolate(antialias=True) calls the same, but returns new memory: two more copies of each
    # image.
    torch.ops.aten._upsample_bilinear2d_aa.out(pixels, list(square.shape[2:]), False, None, None, out=square)


def _resize(pixels: Pixels, crop: Crop, square: Pixels) -> None:
    """Write the crop of an image to a square."""
    left, top = crop.left, crop.top
    # Rounding must not push an edge out of the image: Pillow refuses that.
    right, bottom = min(left + crop.width, pixels.shape[1]), min(top + crop.height, pixels.shape[0])
    if max(abs(edge - round(edge)) for edge in (left, top, right, bottom)) > _WHOLE:
        _resize_by_pillow(pixels, (left, top, right, bottom), square)
    else:
        part = pixels[round(top) : round(bottom), round(left) : round(right)]
        if part.shape == square.shape:
            square[:] = part
        else:
            channels_first = torch.from_numpy(part.copy()).permute(2, 0, 1)[None]
            resize_antialiased(channels_first, torch.from_numpy(square).permute(2, 0, 1)[None])
    if crop.flip:
        _mirror(square)


def _resize_by_pillow(pixels: Pixels, box: tuple[float, float, float, float], square: Pixels) -> None:
    from PIL import Image

    # Convert what the crop needs, and a margin for pixels that the triangles at its edges reach.
    size = len(square)
    reach_x, reach_y = (math.ceil(max(1, extent / size)) for extent in (box[2] - box[0], box[3] - box[1]))
    x, y = max(int(box[0]) - reach_x, 0), max(int(box[1]) - reach_y, 0)
    part = Image.fromarray(pixels[y : math.ceil(box[3]) + reach_y, x : math.ceil(box[2]) + reach_x])
    moved = (box[0] - x, box[1] - y, box[2] - x, box[3] - y)
    square[:] = np.asarray(part.resize((size, size), Image.Resampling.BILINEAR, box=moved))


def _mirror(square: Pixels) -> None:
    image = torch.from_numpy(square)  # numpy takes ten times as long for pixels of three bytes
    image.copy_(image.flip(1))


def _reduction(width: int, height: int, crop: Crop, size: int) -> int:
    """Return how many pixels may become one so that the crop still has `size` pixels a side."""
    if max(width, height) < 8:  # several scales would give the same few pixels
        return 1
    return next((each for each in _REDUCTIONS if min(crop.width, crop.height) >= each * size), 1)


@lru_cache(maxsize=1024)  # to parse a header takes 20 us, and a set has few different sizes
def _npy_size(header: bytes) -> tuple[int, int]:
    """Return height and width from the header of a numpy file."""
    file = io.BytesIO(header)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError(f"a numpy file of version {header[6]}.{header[7]}; pixels are written in version 1.0")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype != np.uint8 or len(shape) != 3 or shape[2] != 3 or min(shape) < 1 or fortran:
        raise ValueError(
            f"a numpy array of {dtype}, {shape}{' in the order of Fortran' if fortran else ''}; a record of pixels is "
            "uint8, (height, width, 3), in the order of C"
        )
    return int(shape[0]), int(shape[1])
