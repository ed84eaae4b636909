"""Opens images by Pillow, and makes RGB of them: for decoding, for packing, and for users' own transforms.

Without torch: processes that pack do not load it.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from azureml_strategy.data.storage import OF_ONE_FILE, StorageError

if TYPE_CHECKING:
    from PIL import Image

# The content decides the format, not the file name. Pillow's other decoders are never offered a file.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
# The most segments before a JPEG's pixels, the most of EXIF among them, and the most scans of a progressive JPEG.
# Cameras write some ten segments, one of them EXIF, and a profile of colours takes up to 255. Encoders write some ten
# scans, each of which costs a pass over all pixels. Pillow's time for EXIF grows by the square of its segments.
_SEGMENTS, _EXIF_SEGMENTS, _SCANS = 1024, 16, 256
JPEG, START_OF_SCAN = b"\xff\xd8\xff", 0xDA
# A marker with a length, or of the end. Within pixels, 0xFF is followed by 0 or by 0xD0 to 0xD7.
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]", re.DOTALL)
# Words of Pillow and torch in errors that are no MemoryError.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")


def open_image(content: bytes) -> Image.Image:
    """Open an image file, without decoding it.

    Raises:
        PIL.UnidentifiedImageError: it has another format, or is none. Pillow raises other exceptions, too.
        CostlyImageError: it would cost much more to read than its size suggests.
    """
    from PIL import Image, UnidentifiedImageError

    refuse_costly(content)
    try:
        return Image.open(io.BytesIO(content), formats=_FORMATS)
    except UnidentifiedImageError:  # it names the address of a BytesIO
        raise UnidentifiedImageError(f"{len(content)} bytes that are no JPEG, PNG, WEBP or BMP image") from None


class CostlyImageError(ValueError):
    """A small image file would take long, or much memory, to decode."""


def refuse_costly(content: bytes) -> None:
    """Refuse an image file that would cost much more than its size and its number of pixels suggest.

    Raises:
        CostlyImageError: it has too many parts, or room for too many pixels is made before Pillow counts them.
    """
    if content.startswith(JPEG):
        segments, exif = _jpeg_segments(content)
        scans = content.count(bytes((0xFF, START_OF_SCAN)))
        if scans > _SCANS:  # the film behind the image of a moving photo may have these bytes as well
            scans = content.count(bytes((0xFF, START_OF_SCAN)), 0, _end_of_jpeg(content))
        if segments > _SEGMENTS or exif > _EXIF_SEGMENTS or scans > _SCANS:
            raise CostlyImageError(
                f"a JPEG file with {segments:,} segments before its pixels, {exif:,} of them EXIF, and {scans:,} "
                f"scans; at most {_SEGMENTS:,}, {_EXIF_SEGMENTS} and {_SCANS} are read"
            )
    elif content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        width, height = _webp_size(content)
        if is_huge(width, height / 2):  # Pillow warns of any that is huge, and refuses twice as much
            raise CostlyImageError(f"a WEBP file of {width:,} x {height:,} pixels, more than Pillow takes")


def _end_of_jpeg(content: bytes) -> int:
    """Return where an image ends: after the first marker of an end that is not within a segment."""
    place = 2
    while (found := _MARKER.search(content, place)) is not None:
        place = found.end()
        if found[0] == b"\xff\xd9":
            return place
        place += int.from_bytes(content[place : place + 2], "big")
    return len(content)


def _webp_size(content: bytes) -> tuple[int, int]:
    """Read width and height from the first chunk (RFC 9649): Pillow allocates canvases already as it opens a file."""
    kind, start = content[12:16], 20
    if kind == b"VP8X":  # three bytes each, less 1, behind flags
        return tuple(1 + int.from_bytes(content[place : place + 3], "little") for place in (start + 4, start + 7))  # type: ignore[return-value]
    if kind == b"VP8L":  # 14 bits each, less 1, behind a signature
        bits = int.from_bytes(content[start + 1 : start + 5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    # 14 bits in two bytes each, behind a tag and a start code
    sides = [int.from_bytes(content[place : place + 2], "little") & 0x3FFF for place in (start + 6, start + 8)]
    return sides[0], sides[1]


def is_huge(width: float, height: float) -> bool:
    """Whether an image has more pixels than Pillow decodes without a warning."""
    from PIL import Image

    return Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS


def _jpeg_segments(content: bytes) -> tuple[int, int]:
    """Count the segments before a JPEG's first scan, and those of EXIF among them, up to one more than is allowed."""
    place, segments, exif = 2, 0, 0
    while segments <= _SEGMENTS and content[place : place + 1] == b"\xff":
        marker = content[place + 1 : place + 2]
        if marker in (b"", b"\xff") or 0xD0 <= marker[0] <= 0xD8 or marker == b"\x01":  # filling, or without a length
            place, segments = place + (1 if marker == b"\xff" else 2), segments + 1
            continue
        if marker[0] == START_OF_SCAN:
            break
        segments += 1
        exif += marker == b"\xe1" and content[place + 4 : place + 10] == b"Exif\0\0"
        place += 2 + max(2, int.from_bytes(content[place + 2 : place + 4], "big"))
    return segments, exif


def is_damage(error: Exception) -> bool:
    """Whether the image itself is damaged, so that another may take its place.

    It is not if the storage fails, memory runs out, or a library is missing: later the same image can be read.
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
    """Return an image of any mode in `RGB`, or in `L` for grey, 8 bits a channel."""
    if image.mode.startswith("I"):  # 16 bits a pixel; Pillow's conversion would clip them at 255
        image = image.convert("I").point(lambda value: value * (1 / 257)).convert("L")
    return image if image.mode == mode else image.convert(mode)
