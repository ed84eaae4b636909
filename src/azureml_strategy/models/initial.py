"""Matrices that start from a normal distribution.

Each draws its own values when it is made: under ZeRO-3 a layer's parameters are spread over the ranks as soon as its
constructor ends, and nothing outside it can fill them any more.
"""

from __future__ import annotations

from torch import nn
from typing_extensions import override

# Standard deviation of GPT-2's initial matrices and embeddings (Radford et al. 2019, `initializer_range` of
# https://huggingface.co/openai-community/gpt2/blob/main/config.json).
INITIAL_STD = 0.02


class NormalLinear(nn.Linear):
    """A linear layer whose matrix starts from a normal distribution and whose bias starts at zero.

    Args:
        in_features: size of an input.
        out_features: size of an output.
        bias: whether it has one.
        std: standard deviation of the initial matrix.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, std: float = INITIAL_STD) -> None:
        self.std = std  # torch's constructor draws the values
        super().__init__(in_features, out_features, bias=bias)

    @override
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class NormalEmbedding(nn.Embedding):
    """A table whose rows start from a normal distribution of standard deviation `INITIAL_STD`."""

    @override
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)
