"""Pictures with detail of all sizes, as photographs have, and their records."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise of each octave, of an amplitude that falls with its frequency."""
    rng = np.random.default_rng(seed)
    total = np.zeros((height, width, 3))
    for octave in range(1, max(width, height).bit_length()):
        noise = rng.standard_normal((2**octave, 2**octave, 1)) + 0.35 * rng.standard_normal((2**octave, 2**octave, 3))
        layers = [Image.fromarray(noise[..., colour].astype(np.float32)) for colour in range(3)]
        grown = [np.asarray(layer.resize((width, height), Image.Resampling.BICUBIC)) for layer in layers]
        total += np.stack(grown, axis=-1) * 2 ** (-0.6 * octave)
    scale = total.std() or 1.0
    return Image.fromarray((127 + 55 * (total - total.mean()) / scale).clip(0, 255).astype(np.uint8))


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """Return an image file."""
    file = io.BytesIO()
    image.save(file, kind, **{"quality": 92, **options} if kind == "JPEG" else options)
    return file.getvalue()


def numpy_file(pixels: NDArray[Any]) -> bytes:
    """Return an array as a .npy file."""
    file = io.BytesIO()
    np.save(file, pixels)
    return file.getvalue()
