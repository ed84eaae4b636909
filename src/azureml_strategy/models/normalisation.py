"""Images as a network takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override


class Normalisation(nn.Module):
    """Brings images into a memory format, and pixels from 0 to 255 to mean 0 and standard deviation 1.

    Args:
        mean: of each channel, for pixels from 0 to 1.
        std: standard deviation of each channel, for pixels from 0 to 1.
        memory_format: of the images returned.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], memory_format: torch.memory_format) -> None:
        super().__init__()
        self.memory_format = memory_format
        # (pixel / 255 - mean) / std as one multiplication and one addition
        spread = 255.0 * torch.tensor(std).view(-1, 1, 1)
        self.register_buffer("scale", 1.0 / spread, persistent=False)
        self.register_buffer("shift", -255.0 * torch.tensor(mean).view(-1, 1, 1) / spread, persistent=False)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Images `(N, 3, H, W)`: uint8 ones are normalised, others taken as normalised."""
        images = images.contiguous(memory_format=self.memory_format)  # while a pixel is still one byte
        if images.dtype != torch.uint8:
            return images
        # the buffers have the dtype of the parameters, also where a precision plugin has converted the module
        return images.to(self.scale.dtype).mul_(self.scale).add_(self.shift)
