"""Rotary positions: queries and keys are turned by an angle that grows with their place in the sequence."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def rotate(states: Tensor, base: float) -> Tensor:
    """Turn the numbers i and i + D/2 of each state by `place * base**(-2i/D)`.

    Su et al. 2021, section 3.2 (https://arxiv.org/abs/2104.09864), with the pairs laid out as in Llama's published
    weights for transformers. It is computed in float32: in bfloat16 an angle of 1,000 is off by up to 2.

    Args:
        states: queries or keys, `(..., T, D)`, D even.
        base: longest wavelength over 2 pi, in tokens.
    """
    cosine, sine = _table(states.shape[-2], states.shape[-1], base, states.device)
    first, second = states.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.type_as(states)


# No buffer: a precision plugin would convert it, and each block of a pipeline has to have it.
@functools.lru_cache(maxsize=8)
def _table(length: int, width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles, float32, `(length, width / 2)` each."""
    # the first use may be a validation under inference_mode, whose tensors no backward pass may keep
    with torch.inference_mode(False):
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
        places = torch.arange(length, dtype=torch.float32, device=device)
        angles = torch.outer(places, base**-exponents)
        return angles.cos(), angles.sin()
