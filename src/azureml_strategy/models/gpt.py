"""GPT as a chain of layers: embedding, blocks, normalisation, output matrix."""

from __future__ import annotations

import functools
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from azureml_strategy.models.attention import CausalSelfAttention
from azureml_strategy.models.chain import ChainLayer, seeded
from azureml_strategy.models.gpt_config import GPTConfig
from azureml_strategy.models.initial import NormalEmbedding, NormalLinear
from azureml_strategy.models.mlp import GELUMLP, SwiGLUMLP


class Embedding(NormalEmbedding):
    """Tokens to hidden states; the table is `weight`, which a tied output matrix shares.

    Args:
        config: the shape of the network.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.vocab_size, config.width)
        learned = config.positions == "learned"
        self.positions = NormalEmbedding(config.context, config.width) if learned else None
        self.dropout = nn.Dropout(config.dropout)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Int64 `(N, T)` to `(N, T, width)`."""
        hidden = super().forward(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return cast(Tensor, self.dropout(hidden))


class Block(nn.Module):
    """Attention and MLP, each behind a normalisation and beside a shortcut.

    Args:
        config: the shape of the network.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.checkpointed = config.checkpoint_activations
        self.attention_norm = _norm(config)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = _norm(config)
        self.mlp = SwiGLUMLP(config) if config.mlp == "swiglu" else GELUMLP(config)
        self.dropout = nn.Dropout(config.dropout)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """`(N, T, width)` to `(N, T, width)`."""
        if self.checkpointed and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(self._forward, hidden, use_reentrant=False))
        return self._forward(hidden)

    def _forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return cast(Tensor, hidden + self.dropout(self.mlp(self.mlp_norm(hidden))))


def gpt_layers(config: GPTConfig, seed: int) -> list[ChainLayer]:
    """The network from int64 tokens `(N, T)` to logits `(N, T, vocab_size)`.

    The initial parameters are GPT-2's (Radford et al. 2019): normal with a standard deviation of 0.02, less where a
    block writes to the residual stream; biases zero; gains one. They depend on `config` and `seed` alone, not on
    which layers a process makes.

    Args:
        config: the shape of the network.
        seed: of the initial parameters.
    """
    last = config.layers + 1
    tie = "embedding" if config.tied else None
    output = functools.partial(NormalLinear, config.width, config.vocab_size, bias=False)
    blocks = [
        ChainLayer(seeded(functools.partial(Block, config), seed, index), f"block_{index}", "block")
        for index in range(1, last)
    ]
    return [
        ChainLayer(seeded(functools.partial(Embedding, config), seed, 0), "embedding", "embedding", tie),
        *blocks,
        ChainLayer(seeded(functools.partial(_norm, config), seed, last), "norm", "norm"),
        # a tied output matrix draws what the embedding draws first, so both start equal in separate processes too
        ChainLayer(seeded(output, seed, 0 if config.tied else last + 1), "output", "output", tie),
    ]


def _norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)
