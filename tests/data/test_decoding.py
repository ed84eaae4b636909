"""Decoders against Pillow's decoding of the whole image, on every pixel format, and on damage."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from PIL.Image import Resampling
from tests.data.photographs import encode, numpy_file, photograph

from azureml_strategy.data.decoding import (
    Crop,
    Decoder,
    centre_crop,
    choose_decoder,
    decode_pillow,
    decode_pixels,
    decode_simplejpeg,
    random_crop,
)

Pixels = NDArray[np.uint8]
Choose = Callable[[int, int], Crop]
_DECODERS = [decode_pillow, decode_simplejpeg]


def _whole(width: int, height: int) -> Crop:
    return Crop(0, 0, width, height)


def _decode(decoder: Decoder, record: bytes, size: int, choose: Choose = _whole) -> Pixels:
    square = np.full((size, size, 3), 77, dtype=np.uint8)
    decoder(record, choose, square)
    return square


def _expected(image: Image.Image, size: int, crop: Crop) -> Pixels:
    box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
    square = np.asarray(image.convert("RGB").resize((size, size), Resampling.BILINEAR, box=box))
    return square[:, ::-1] if crop.flip else square


def _errors(actual: Pixels, expected: Pixels) -> tuple[float, int, int]:
    """Mean and maximum of the difference, in grey levels, and its maximum away from the edge.

    Pillow's triangles reach over the edge of a crop into the rest of the image, and torch's do not.
    """
    difference = np.abs(actual.astype(int) - expected)
    edge = 1 + len(actual) // 30
    return float(difference.mean()), int(difference.max()), int(difference[edge:-edge, edge:-edge].max())


_CHOICES: dict[str, Choose] = {
    "random": lambda width, height: random_crop(width, height, 0.08, False, random.Random(width)),
    "large": lambda width, height: random_crop(width, height, 0.8, True, random.Random(height)),
    "centre": lambda width, height: centre_crop(width, height, 0.875),
    "fraction": lambda width, height: Crop(width * 0.251, height * 0.137, width * 0.503, height * 0.629, True),
}


@pytest.mark.parametrize("choice", _CHOICES)
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(
    ("width", "height", "size"),
    [(500, 375, 224), (333, 251, 96), (501, 377, 64), (1000, 751, 224), (1601, 1203, 96), (120, 97, 224), (64, 64, 96)],
)
def test_simplejpeg_is_within_a_grey_level_of_the_whole_image(
    width: int, height: int, size: int, mode: str, choice: str
) -> None:
    record = encode(photograph(width, height).convert(mode))
    actual = _decode(decode_simplejpeg, record, size, _CHOICES[choice])
    expected = _expected(Image.open(io.BytesIO(record)), size, _CHOICES[choice](width, height))
    mean, highest, within = _errors(actual, expected)
    assert mean < 1
    assert highest < 24
    assert within <= 6


@pytest.mark.parametrize("choice", _CHOICES)
def test_at_its_full_size_simplejpeg_is_pillow(choice: str) -> None:
    record = encode(photograph(500, 375))
    actual, expected = (
        _decode(decoder, record, 224, _CHOICES[choice]) for decoder in (decode_simplejpeg, decode_pillow)
    )
    mean, _, within = _errors(actual, expected)
    assert mean < 0.1
    assert within <= 1


@pytest.mark.parametrize(("width", "height", "size"), [(100, 60, 32), (640, 480, 64), (1600, 1200, 64), (20, 30, 64)])
def test_pillow_makes_what_it_makes_of_the_whole_image(width: int, height: int, size: int) -> None:
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    channels = [np.sin(3 * x + y), np.cos(2 * y), x * y]
    picture = Image.fromarray((np.stack(channels, axis=-1).clip(0, 1) * 255).astype(np.uint8))
    crop = Crop(width * 0.25, height * 0.1, width * 0.5, height * 0.75)
    actual = _decode(decode_pillow, encode(picture, quality=98), size, lambda *_: crop)
    mean, highest, _ = _errors(actual, _expected(picture, size, crop))
    assert mean < 2
    assert highest < 16


@settings(max_examples=60, deadline=None)
@given(
    st.integers(8, 300),
    st.integers(8, 300),
    st.integers(1, 64),
    st.sampled_from(
        [{"subsampling": each} for each in (0, 1, 2)] + [{"restart_marker_blocks": 3}, {"progressive": True}]
    ),
    st.integers(),
)
def test_rows_that_are_not_decoded_change_nothing(
    width: int, height: int, size: int, how: dict[str, int], seed: int
) -> None:
    record = encode(photograph(width, height), **how)
    crop = random_crop(width, height, 0.08, False, random.Random(seed))
    # With anything behind its end, a file is decoded as a whole.
    actual, expected = (_decode(decode_simplejpeg, each, size, lambda *_: crop) for each in (record, record + b"\0"))
    assert np.array_equal(actual, expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 70), st.floats(0.05, 1.0))
def test_no_size_is_refused(width: int, height: int, size: int, share: float) -> None:
    image = Image.new("RGB", (width, height), (90, 90, 90))
    for record in (encode(image), numpy_file(np.asarray(image))):
        for choose in (_whole, lambda w, h: centre_crop(w, h, share), _CHOICES["random"]):
            for decoder in _DECODERS:
                assert np.abs(_decode(decoder, record, size, choose).astype(int) - 90).max() <= 2


@pytest.mark.parametrize("decoder", _DECODERS)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "npy"])
def test_flipping_mirrors_left_and_right(decoder: Decoder, kind: str) -> None:
    image = photograph(50, 40)
    record = numpy_file(np.asarray(image)) if kind == "npy" else encode(image, kind)
    plain = _decode(decoder, record, 30, lambda *_: Crop(5, 5, 34, 34))
    assert not np.array_equal(plain, plain[:, ::-1])
    assert np.array_equal(_decode(decoder, record, 30, lambda *_: Crop(5, 5, 34, 34, flip=True)), plain[:, ::-1])


@pytest.mark.parametrize("decoder", _DECODERS)
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_mode_of_a_png_becomes_rgb(decoder: Decoder, mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.full((8, 8), 204 * 257, dtype=np.uint16))
    else:
        image = Image.new("RGB", (8, 8), (255, 255, 255) if mode == "1" else (204, 204, 204)).convert(mode)
    grey = 255 if mode == "1" else 204  # a colour of the palette
    assert np.abs(_decode(decoder, encode(image, "PNG"), 4).astype(int) - grey).max() <= 1


@pytest.mark.parametrize("decoder", _DECODERS)
@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_every_mode_of_a_jpeg_becomes_rgb(decoder: Decoder, mode: str) -> None:
    record = encode(Image.new("RGB", (64, 64), (200, 200, 200)).convert(mode), quality=98)
    assert np.abs(_decode(decoder, record, 8).astype(int) - 200).max() <= 3


@pytest.mark.parametrize("decoder", _DECODERS)
@pytest.mark.parametrize("kind", ["WEBP", "BMP"])
def test_other_formats_are_left_to_pillow(decoder: Decoder, kind: str) -> None:
    record = encode(Image.new("RGB", (9, 9), (1, 2, 3)), kind, **{"lossless": True} if kind == "WEBP" else {})
    assert _decode(decoder, record, 3)[0, 0].tolist() == [1, 2, 3]
    with pytest.raises(Exception, match="no JPEG, PNG, WEBP or BMP image"):
        _decode(decoder, encode(Image.new("RGB", (9, 9)), "TIFF"), 3)


@pytest.mark.parametrize("decoder", _DECODERS)
def test_a_rotation_in_exif_is_ignored(decoder: Decoder) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned, plain = encode(photograph(40, 20), exif=exif), encode(photograph(40, 20))
    assert np.array_equal(_decode(decoder, turned, 16), _decode(decoder, plain, 16))


@pytest.mark.parametrize("decoder", _DECODERS)
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95, 0.999])
def test_a_jpeg_that_was_cut_off_is_refused_even_where_the_crop_is_whole(decoder: Decoder, share: float) -> None:
    record = encode(photograph(500, 375))
    with pytest.raises(Exception, match=r"truncated|cannot identify|no JPEG"):
        _decode(decoder, record[: int(len(record) * share)], 64, lambda *_: Crop(0, 0, 64, 10))


def test_a_jpeg_that_simplejpeg_refuses_and_pillow_reads_is_read() -> None:
    record = encode(photograph(100, 80))
    odd = record.replace(b"\xff\xda", b"\0\0\xff\xda", 1)  # bytes between segments, as some files of ImageNet have
    assert np.array_equal(_decode(decode_simplejpeg, odd, 50), _decode(decode_pillow, record, 50))


@pytest.mark.filterwarnings("error::PIL.Image.DecompressionBombWarning")
def test_what_would_fill_the_memory_is_refused() -> None:
    record = bytearray(encode(Image.new("RGB", (64, 64))))
    place = record.index(b"\xff\xc0") + 5
    record[place : place + 4] = b"\xff\xff\xff\xff"
    with pytest.raises(Image.DecompressionBombError):
        _decode(decode_simplejpeg, bytes(record), 8)


def test_a_window_of_pixels_is_a_copy() -> None:
    pixels = np.asarray(photograph(80, 60))
    record = numpy_file(pixels)
    assert np.array_equal(_decode(decode_pixels, record, 40, lambda *_: Crop(7, 11, 40, 40)), pixels[11:51, 7:47])
    # The centre of an odd number of pixels, where half a pixel would blur everything.
    assert np.array_equal(_decode(decode_pixels, record, 40, lambda *_: Crop(7.5, 10.5, 40, 40)), pixels[10:50, 7:47])


@pytest.mark.parametrize("choice", _CHOICES)
@pytest.mark.parametrize("size", [31, 200])
def test_pixels_are_resized_as_by_pillow(choice: str, size: int) -> None:
    image = photograph(341, 256)
    actual = _decode(decode_pixels, numpy_file(np.asarray(image)), size, _CHOICES[choice])
    mean, _, within = _errors(actual, _expected(image, size, _CHOICES[choice](341, 256)))
    assert mean < 0.3
    assert within <= 1


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((4, 4, 3), np.float32), r"float32, \(4, 4, 3\)"),
        (np.zeros((4, 4), np.uint8), r"uint8, \(4, 4\)"),
        (np.zeros((4, 4, 4), np.uint8), r"\(4, 4, 4\)"),
        (np.zeros((0, 4, 3), np.uint8), r"\(0, 4, 3\)"),
        (np.asfortranarray(np.zeros((4, 5, 3), np.uint8)), "order of Fortran"),
    ],
)
def test_other_arrays_are_refused(array: NDArray[np.uint8], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _decode(decode_pixels, numpy_file(array), 2)


@pytest.mark.parametrize("keep", [7, 60, 128, 500])
def test_pixels_that_were_cut_off_are_refused(keep: int) -> None:
    record = numpy_file(np.zeros((20, 20, 3), np.uint8))
    with pytest.raises(ValueError, match=r"pixels of 20 x 20 take 1328|EOF|header|magic"):
        _decode(decode_pixels, record[:keep], 2)


def test_decoders_are_chosen_by_name() -> None:
    assert choose_decoder("pillow") is decode_pillow
    assert choose_decoder("auto") is choose_decoder("simplejpeg") is decode_simplejpeg
    with pytest.raises(ValueError, match="decoder='turbo', but it must be auto, pillow or simplejpeg"):
        choose_decoder("turbo")


_WITHOUT = """
import sys
sys.modules["simplejpeg"] = None  # as if it were not installed
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "simplejpeg" else find_spec(name, *rest)
from azureml_strategy.data.decoding import choose_decoder, decode_pillow
assert choose_decoder("auto") is decode_pillow
assert "PIL" not in sys.modules
choose_decoder("simplejpeg")
"""


def test_without_simplejpeg_auto_is_pillow_and_the_extra_is_named() -> None:
    run = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, timeout=250)
    assert "simplejpeg is not installed here. Type: pip install -c constraints.txt '.[data]'" in run.stderr
