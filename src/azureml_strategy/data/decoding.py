"""Decodes images: from the bytes of a record to a crop of it, resized to a square.

A record is a JPEG, PNG, WEBP or BMP file, or a numpy file (.npy) of pixels. What is inside decides, not a name.
Greyscale, palette, CMYK, transparent and 16-bit images become RGB. EXIF rotation is ignored, as in the published
results on ImageNet. If the crop allows it, a JPEG is decoded at a half, a quarter or an eighth of its size, which costs
correspondingly less.

Both decoders resize with antialiasing, by a triangle that covers as many pixels as become one (Pillow's BILINEAR).
torch's operator for bytes does so in a quarter of the time, but only for crops at whole pixels: Pillow takes the
others. OpenCV was measured as well: INTER_LINEAR takes two thirds of torch's time, but it skips pixels, and a crop of
370 pixels made 224 is 1.5 grey levels off on average; INTER_AREA takes four times as long.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from azureml_strategy.data.crops import Crop
from azureml_strategy.data.jpeg_rows import with_fewer_rows
from azureml_strategy.data.pillow_images import is_huge, open_image, refuse_costly, to_rgb
from azureml_strategy.lazy import install_line

Pixels = NDArray[np.uint8]
# Maps width and height of an image, in pixels, to the crop. It is called again if a decoder gives up on an image.
ChooseCrop = Callable[[int, int], Crop]
# Decodes a record into uint8 `(size, size, 3)`, RGB. Raises exceptions of many types: Pillow has no common one.
Decoder = Callable[[bytes, ChooseCrop, Pixels], None]

_JPEG, _NPY = b"\xff\xd8\xff", b"\x93NUMPY"
# Of simplejpeg's scales, n/8, only these are faster than the whole: libjpeg-turbo has vector code for them.
_REDUCTIONS = (8, 4, 2)
# Nearer than this, in pixels, a crop lies at whole pixels. Arithmetic with floating point leaves some 1e-13.
_WHOLE = 1e-6


def choose_decoder(name: str) -> Decoder:
    """Return a decoder by name.

    Args:
        name: `pillow`; `simplejpeg`, which is faster on JPEGs and leaves all else to Pillow; or `auto`, simplejpeg if
            it is installed.

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

    if record.startswith(_NPY):
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

    if not record.startswith(_JPEG):
        return decode_pillow(record, choose_crop, square)
    refuse_costly(record)
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(record)
        if is_huge(width, height):  # Pillow warns, or refuses what would fill the memory
            return decode_pillow(record, choose_crop, square)
        crop = choose_crop(width, height)
        reduction = _reduction(width, height, crop, len(square))
        # Triangles reach beyond the crop, and colours beyond their pixels.
        reach = math.ceil(crop.height / len(square)) + 3 * reduction
        shorter, rows = with_fewer_rows(record, math.ceil(crop.top + crop.height) + reach)
        pixels = simplejpeg.decode_jpeg(
            shorter,
            min_height=-(-(height if rows < 0 else rows) // reduction),
            min_width=-(-width // reduction),
            strict=rows < 0,
        )
    except ValueError:  # CMYK, or damage: Pillow reads some of these files, and says what is wrong with the others
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
    """Resize images by triangles, as Pillow's BILINEAR.

    Args:
        pixels: `(N, 3, height, width)`. Bytes are fastest in channels_last.
        square: what to write to, `(N, 3, size, size)`.
    """
    # What torch.nn.functional.interpolate(antialias=True) calls. It cannot write to memory that there is, and costs
    # two more copies of each image.
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


@lru_cache(maxsize=1024)  # as many as there are different sizes: to read a header takes 20 us
def _npy_size(header: bytes) -> tuple[int, int]:
    """Return height and width of the pixels in a numpy file, by all that comes before them."""
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
