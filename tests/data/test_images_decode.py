"""Decoding against plain Pillow, and of every pixel format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from azureml_strategy.data.images import Crop, centre_crop, decode_image


def _whole(width: int, height: int) -> Crop:
    return Crop(0, 0, width, height)


def _photograph(width: int, height: int) -> Image.Image:
    """A smooth picture: JPEG and resizing change it little."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    channels = [np.sin(3 * x + y), np.cos(2 * y), x * y]
    return Image.fromarray((np.stack(channels, axis=-1).clip(0, 1) * 255).astype(np.uint8))


@pytest.mark.parametrize(("width", "height", "size"), [(100, 60, 32), (640, 480, 64), (1600, 1200, 64), (20, 30, 64)])
def test_a_crop_is_what_pillow_makes_of_the_whole_image(tmp_path: Path, width: int, height: int, size: int) -> None:
    picture = _photograph(width, height)
    picture.save(tmp_path / "a.jpg", quality=98)
    crop = Crop(width * 0.25, height * 0.1, width * 0.5, height * 0.75)
    box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
    expected = np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR, box=box)).astype(int)
    actual = decode_image(str(tmp_path / "a.jpg"), size, lambda *_: crop)
    assert actual.shape == (3, size, size)
    assert actual.dtype == torch.uint8
    difference = np.abs(actual.permute(1, 2, 0).numpy().astype(int) - expected)
    assert difference.mean() < 2
    assert difference.max() < 16


def test_flipping_mirrors_left_and_right(tmp_path: Path) -> None:
    _photograph(40, 40).save(tmp_path / "a.png")
    plain = decode_image(str(tmp_path / "a.png"), 40, lambda *_: Crop(0, 0, 40, 40))
    mirrored = decode_image(str(tmp_path / "a.png"), 40, lambda *_: Crop(0, 0, 40, 40, flip=True))
    assert torch.equal(mirrored, plain.flip(-1))
    assert not torch.equal(mirrored, plain)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_mode_of_a_png_becomes_rgb(tmp_path: Path, mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.full((8, 8), 204 * 257, dtype=np.uint16))
    else:
        image = Image.new("RGB", (8, 8), (255, 255, 255) if mode == "1" else (204, 204, 204)).convert(mode)
    image.save(tmp_path / "a.png")
    grey = 255 if mode == "1" else 204  # a colour of the palette
    assert decode_image(str(tmp_path / "a.png"), 4, _whole).sub(grey).abs().max() <= 1


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_every_mode_of_a_jpeg_becomes_rgb(tmp_path: Path, mode: str) -> None:
    Image.new("RGB", (64, 64), (200, 200, 200)).convert(mode).save(tmp_path / "a.jpg", quality=98)
    decoded = decode_image(str(tmp_path / "a.jpg"), 8, _whole).int()
    assert (decoded - 200).abs().max() <= 3


def test_what_is_inside_decides_and_not_the_name(tmp_path: Path) -> None:
    Image.new("RGB", (9, 9), (1, 2, 3)).save(tmp_path / "a.jpg", format="PNG")
    assert decode_image(str(tmp_path / "a.jpg"), 3, _whole)[:, 0, 0].tolist() == [1, 2, 3]


def test_a_rotation_in_exif_is_ignored(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = _photograph(40, 20)
    picture.save(tmp_path / "turned.jpg", exif=exif, quality=98)
    picture.save(tmp_path / "plain.jpg", quality=98)
    turned, plain = (decode_image(str(tmp_path / f"{name}.jpg"), 16, _whole) for name in ("turned", "plain"))
    assert torch.equal(turned, plain)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 70), st.floats(0.05, 1.0))
def test_no_size_is_refused(tmp_path: Path, width: int, height: int, size: int, share: float) -> None:
    path = str(tmp_path / "a.jpg")
    Image.new("RGB", (width, height), (90, 90, 90)).save(path)
    for choose in (_whole, lambda w, h: centre_crop(w, h, share)):
        assert (decode_image(path, size, choose).int() - 90).abs().max() <= 2
