"""Opens images by Pillow, and makes RGB of them: for decoding, for packing, and for users' own transforms.

Without torch: processes that pack do not load it.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from azureml_strategy.data.storage import OF_ONE_FILE, StorageError

if TYPE_CHECKING:
    from PIL import Image

# The content decides the format, not the file name. Pillow's other decoders are never offered a file.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
# What Pillow and torch say in errors that are no MemoryError.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")


def open_image(content: bytes) -> Image.Image:
    """Open an image file, without decoding it.

    Raises:
        PIL.UnidentifiedImageError: it has another format, or is none. Pillow raises other exceptions, too.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(content), formats=_FORMATS)
    except UnidentifiedImageError:  # it names the address of a BytesIO
        raise UnidentifiedImageError(f"{len(content)} bytes that are no JPEG, PNG, WEBP or BMP image") from None


def is_damage(error: Exception) -> bool:
    """Whether it is the image's fault that it cannot be read, so that another may stand in for it.

    It is not where the storage fails, memory runs out, or a library is missing: the same image is read well later.
    """
    if isinstance(error, (MemoryError, ImportError, StorageError, TimeoutError, ConnectionError)):
        return False
    if isinstance(error, OSError) and error.errno is not None:  # those of Pillow have no number
        return error.errno in OF_ONE_FILE
    return not any(words in str(error) for words in _OUT_OF_MEMORY)


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image of any mode in RGB, 8 bits a channel."""
    return to_mode(image, "RGB")


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """Return an image of any mode in another one of 8 bits a channel.

    Args:
        image: an open one.
        mode: `RGB`, or `L` for grey.
    """
    if image.mode.startswith("I"):  # 16 bits a pixel; Pillow's conversion would clip them at 255
        image = image.convert("I").point(lambda value: value * (1 / 257)).convert("L")
    return image if image.mode == mode else image.convert(mode)
