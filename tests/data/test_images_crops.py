"""Crops lie within their images and are distributed as they should be."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.data.decoding import centre_crop, random_crop, window_crop

_SIDE = st.integers(1, 5000)


@given(_SIDE, _SIDE, st.floats(0.01, 1.0), st.integers())
def test_a_random_crop_lies_within_the_image(width: int, height: int, scale: float, seed: int) -> None:
    crop = random_crop(width, height, scale, True, random.Random(seed))
    assert crop.left >= 0
    assert crop.top >= 0
    assert crop.width > 0
    assert crop.height > 0
    assert crop.left + crop.width <= width + 1e-6
    assert crop.top + crop.height <= height + 1e-6


@given(st.integers(200, 2000), st.integers(200, 2000), st.integers())
def test_a_random_crop_has_the_area_and_the_aspect_ratio_asked_for(width: int, height: int, seed: int) -> None:
    crop = random_crop(width, height, 0.5, False, random.Random(seed))
    assert 0.74 <= crop.width / crop.height <= 1.35
    if max(width, height) / min(width, height) < 1.4:  # else none of ten may fit
        assert crop.width * crop.height >= 0.49 * width * height
    assert not crop.flip


def test_half_of_the_crops_are_mirrored_and_they_cover_the_image() -> None:
    rng = random.Random(0)
    crops = [random_crop(500, 400, 0.08, True, rng) for _ in range(2000)]
    assert 0.45 < sum(crop.flip for crop in crops) / len(crops) < 0.55
    shares = [crop.width * crop.height / (500 * 400) for crop in crops]
    assert min(shares) < 0.1
    assert max(shares) > 0.9
    assert 0.45 < sum(crop.left + crop.width / 2 < 250 for crop in crops) / len(crops) < 0.55


def test_an_extremely_long_image_gives_the_largest_allowed_crop_of_its_centre() -> None:
    crop = random_crop(3000, 30, 1.0, False, random.Random(0))
    assert (crop.width, crop.height) == (pytest.approx(40), pytest.approx(30))
    assert crop.left == pytest.approx(1480)


@given(_SIDE, _SIDE, st.floats(0.01, 1.0))
def test_the_centre_is_a_square_in_the_centre(width: int, height: int, share: float) -> None:
    crop = centre_crop(width, height, share)
    assert crop.width == crop.height == pytest.approx(min(width, height) * share)
    assert crop.left + crop.width / 2 == pytest.approx(width / 2)
    assert crop.top + crop.height / 2 == pytest.approx(height / 2)


@given(_SIDE, _SIDE, st.integers(1, 600), st.integers())
def test_a_window_is_a_square_of_whole_pixels_within_the_image(width: int, height: int, size: int, seed: int) -> None:
    crop = window_crop(width, height, size, True, random.Random(seed))
    assert crop.width == crop.height == min(width, height, size)
    assert all(isinstance(side, int) for side in crop[:4])
    assert 0 <= crop.left <= width - crop.width
    assert 0 <= crop.top <= height - crop.height


def test_windows_cover_the_image_and_half_of_them_are_mirrored() -> None:
    rng = random.Random(0)
    crops = [window_crop(260, 258, 256, True, rng) for _ in range(2000)]
    assert {crop.left for crop in crops} == set(range(5))
    assert {crop.top for crop in crops} == set(range(3))
    assert 0.45 < sum(crop.flip for crop in crops) / len(crops) < 0.55
