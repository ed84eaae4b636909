"""GPTs of a few thousand parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from azureml_strategy.models import GPTConfig, build_chain, gpt_layers

GPT2 = GPTConfig(
    vocab_size=61,
    context=16,
    layers=3,
    width=32,
    heads=4,
    mlp_width=128,
    norm="layernorm",
    positions="learned",
    mlp="gelu",
    bias=True,
)
LLAMA = GPTConfig(vocab_size=61, context=16, layers=3, width=32, heads=4, kv_heads=2, mlp_width=88, tied=False)


def network(config: GPTConfig, seed: int = 0) -> nn.Sequential:
    return nn.Sequential(*build_chain(gpt_layers(config, seed)))


def tokens(rows: int = 2, length: int = 16) -> Tensor:
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(1))
