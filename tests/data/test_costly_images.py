"""Image files that are made to cost much are refused before they are decoded, and ordinary ones are not."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from PIL import ImageCms, UnidentifiedImageError
from tests.data.photographs import photograph
from tests.memory import peak_of

from azureml_strategy.data.decoding import Crop, choose_decoder
from azureml_strategy.data.packing.images import ImageForm
from azureml_strategy.data.packing.shards import UnreadableError
from azureml_strategy.data.pillow_images import CostlyImageError, open_image, refuse_costly


def jpeg(**how: Any) -> bytes:
    file = io.BytesIO()
    photograph(64, 48).save(file, "JPEG", **how)
    return file.getvalue()


def with_segments(*segments: tuple[int, bytes]) -> bytes:
    """A JPEG with segments after its first marker."""
    made = b"".join(struct.pack(">BBH", 0xFF, marker, 2 + len(content)) + content for marker, content in segments)
    return jpeg()[:2] + made + jpeg()[2:]


def webp(width: int, height: int) -> bytes:
    """The header of an animation, for which Pillow makes two canvases when it opens it."""
    flags = struct.pack("<I", 2) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunks = b"VP8X" + struct.pack("<I", 10) + flags + b"ANIM" + struct.pack("<I", 6) + bytes(6)
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


SCAN = jpeg(progressive=True)
SCAN = SCAN[SCAN.rindex(b"\xff\xda") : -2]
COSTLY = {
    # 300,000 of them, in 5 MB, took minutes.
    "EXIF": with_segments(*[(0xE1, b"Exif\0\0" + bytes(4))] * 3000),
    "few EXIF, but large": with_segments(*[(0xE1, b"Exif\0\0" + bytes(60_000))] * 40),
    "segments": with_segments(*[(0xFE, b"")] * 3000),
    "scans": jpeg(progressive=True)[:-2] + 400 * SCAN + b"\xff\xd9",
    "canvas": webp(16_000, 16_000),
}
NOT_READ = {
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n",
    "gif": b"GIF89a" + bytes(20),
    "nothing": b"",
    "start": jpeg()[:3],
    "filling": b"\xff\xd8" + b"\xff" * 100_000,
}


@pytest.mark.parametrize("decoder", ["pillow", "simplejpeg"])
@pytest.mark.parametrize("kind", COSTLY)
def test_a_costly_image_is_refused(kind: str, decoder: str) -> None:
    square = np.zeros((8, 8, 3), np.uint8)
    with (
        peak_of(32 * 2**20),
        pytest.raises(CostlyImageError, match=r"at most 1,024, 16 and|more than Pillow takes"),
    ):
        choose_decoder(decoder)(COSTLY[kind], lambda width, height: Crop(0, 0, width, height), square)
    with pytest.raises(UnreadableError, match="CostlyImageError"):
        ImageForm().encode(COSTLY[kind])


def test_the_film_of_a_moving_photo_does_not_count() -> None:
    square = np.zeros((8, 8, 3), np.uint8)
    for decoder in ("pillow", "simplejpeg"):
        photo = jpeg(progressive=True) + 400 * b"film\xff\xda"
        choose_decoder(decoder)(photo, lambda width, height: Crop(0, 0, width, height), square)
    hidden = b"\xff\xfe\x00\x04\xff\xd9"  # the marker of an end in a comment ends nothing
    with pytest.raises(CostlyImageError):
        refuse_costly(jpeg(progressive=True)[:-2] + hidden + 400 * SCAN + b"\xff\xd9")


def test_a_large_webp_that_pillow_takes_is_taken() -> None:
    refuse_costly(webp(12_000, 10_000))
    with pytest.raises(CostlyImageError):
        refuse_costly(webp(16_000, 12_000))


@pytest.mark.parametrize("kind", NOT_READ)
def test_another_format_is_not_offered_to_its_decoder(kind: str) -> None:
    with pytest.raises((UnidentifiedImageError, CostlyImageError)):
        open_image(NOT_READ[kind])


@pytest.mark.parametrize(
    "how",
    [
        {"progressive": True, "exif": b"Exif\0\0" + bytes(60_000)},
        {"icc_profile": 20 * ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes() + bytes(10**6)},
        {"comment": b"a" * 60_000, "xmp": b"b" * 60_000},
    ],
    ids=["exif", "profile of colours", "comment"],
)
def test_what_cameras_write_is_read(how: dict[str, Any]) -> None:
    with open_image(jpeg(**how)) as image:
        assert np.asarray(image).shape == (48, 64, 3)
