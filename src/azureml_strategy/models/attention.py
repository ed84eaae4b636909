"""Causal self-attention."""

from __future__ import annotations

import math
from typing import cast

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from azureml_strategy.models.gpt_config import GPTConfig
from azureml_strategy.models.initial import INITIAL_STD, NormalLinear
from azureml_strategy.models.rotary import rotate


def residual_std(config: GPTConfig) -> float:
    """Standard deviation of the matrices that write to the residual stream.

    Each block adds to it twice, so it would grow with the root of `2 * layers` (Radford et al. 2019, section 2.3).
    """
    return INITIAL_STD / math.sqrt(2 * config.layers)


class CausalSelfAttention(nn.Module):
    """Every token attends to itself and to those before it, through torch's `scaled_dot_product_attention`.

    Queries, keys and values have a matrix each, so that tensor parallelism can give each rank some of the heads; how
    many there are is read from the states.

    Args:
        config: the shape of the network.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.grouped = config.key_value_heads != config.heads
        self.rotary_base = config.rotary_base if config.positions == "rotary" else None
        self.dropout = config.dropout
        self.query = NormalLinear(config.width, config.width, config.bias)
        self.key = NormalLinear(config.width, config.key_value_heads * config.head_width, config.bias)
        self.value = NormalLinear(config.width, config.key_value_heads * config.head_width, config.bias)
        self.output = NormalLinear(config.width, config.width, config.bias, residual_std(config))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """`(N, T, width)` to `(N, T, width)`."""
        query, key, value = (self._heads(matrix(hidden)) for matrix in (self.query, self.key, self.value))
        if self.rotary_base is not None:
            query, key = rotate(query, self.rotary_base), rotate(key, self.rotary_base)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=self.grouped
        )
        return cast(Tensor, self.output(attended.transpose(1, 2).flatten(2)))

    def _heads(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:-1], -1, self.head_width).transpose(1, 2)
