"""The part of a block that works on each token alone."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from azureml_strategy.models.attention import residual_std
from azureml_strategy.models.gpt_config import GPTConfig
from azureml_strategy.models.initial import NormalLinear


class GELUMLP(nn.Module):
    """Two matrices with a GELU between them, by the tanh approximation that GPT-2 uses.

    Args:
        config: the shape of the network.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = NormalLinear(config.width, config.mlp_width, config.bias)
        self.down = NormalLinear(config.mlp_width, config.width, config.bias, residual_std(config))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """`(N, T, width)` to `(N, T, width)`."""
        return cast(Tensor, self.down(functional.gelu(self.up(hidden), approximate="tanh")))


class SwiGLUMLP(nn.Module):
    """Two matrices side by side, one of them through a SiLU, multiplied (Shazeer 2020, https://arxiv.org/abs/2002.05202).

    Args:
        config: the shape of the network.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = NormalLinear(config.width, config.mlp_width, config.bias)
        self.up = NormalLinear(config.width, config.mlp_width, config.bias)
        self.down = NormalLinear(config.mlp_width, config.width, config.bias, residual_std(config))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """`(N, T, width)` to `(N, T, width)`."""
        return cast(Tensor, self.down(functional.silu(self.gate(hidden)) * self.up(hidden)))
