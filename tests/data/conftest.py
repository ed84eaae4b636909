"""Small sets of real image files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

WriteImages = Callable[[Path, int], Path]


@pytest.fixture
def write_images() -> WriteImages:
    """Write so many JPEG files into a class folder; the grey of each is 10 times its number."""

    def write(folder: Path, count: int) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = np.full((24, 30, 3), 10 * number, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number:03}.jpg", quality=95)
        return folder

    return write
