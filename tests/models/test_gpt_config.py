"""Shapes, parameters and FLOPs, without making the large ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.gpts import GPT2, LLAMA, network

import azureml_strategy
from azureml_strategy.models import GPTConfig

CONF = Path(azureml_strategy.__file__).parent / "conf" / "model"
PUBLISHED = {
    "125m": 124_439_808,
    "350m": 354_823_168,
    "1b": 1_100_048_384,
    "3b": 3_426_473_600,
    "7b": 6_738_415_616,
    "13b": 13_015_864_320,
    "20b": 20_554_567_680,
}


def shipped(size: str) -> GPTConfig:
    settings = yaml.safe_load((CONF / f"gpt_{size}.yaml").read_text())["network"]
    assert settings.pop("_target_") == "azureml_strategy.models.GPTConfig"
    return GPTConfig(**settings)


def made(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in network(config).parameters())


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_sizes_are_the_published_ones(size: str) -> None:
    config = shipped(size)
    assert config.parameters() == made(config) == PUBLISHED[size]


def test_the_tiny_one_is_tiny() -> None:
    assert made(shipped("tiny")) == shipped("tiny").parameters() < 1_000_000


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 3),
    st.sampled_from([(8, 4, None), (8, 4, 2), (12, 2, 1)]),
    st.sampled_from(["rmsnorm", "layernorm"]),
    st.sampled_from(["rotary", "learned"]),
    st.sampled_from(["swiglu", "gelu"]),
    st.booleans(),
    st.booleans(),
)
def test_the_formula_counts_every_combination(
    layers: int, shape: tuple[int, int, int | None], norm: Any, positions: Any, mlp: Any, tied: bool, bias: bool
) -> None:
    width, heads, kv_heads = shape
    config = GPTConfig(17, 9, layers, width, heads, 20, kv_heads, norm, positions, mlp, tied, bias)
    assert made(config) == config.parameters()


def test_flops_of_gpt2_by_hand() -> None:
    """Palm's appendix B: 6 N + 12 L H Q T; N without the 1,024 learned positions, with the tied table once."""
    assert shipped("125m").flops_per_token(1024) == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 12 * 64 * 1024


def test_flops_leave_out_an_embedding_that_is_only_looked_up() -> None:
    assert LLAMA.flops_per_token(16) == 6 * (LLAMA.parameters() - 61 * 32) + 12 * 3 * 32 * 16


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"layers": 0}, "layers=0 must be 1 or more"),
        ({"kv_heads": 0}, "key_value_heads=0 must be 1 or more"),
        ({"heads": 5}, "width=32 does not divide by heads=5"),
        ({"kv_heads": 3}, "heads=4 does not divide by kv_heads=3"),
        ({"heads": 32}, "width / heads = 1 is odd"),
        ({"dropout": 1.0}, "dropout=1.0 must be from 0"),
        ({"norm": "batchnorm"}, "norm='batchnorm' must be one of"),
        ({"mlp": "relu"}, "mlp='relu' must be one of"),
        ({"positions": "alibi"}, "positions='alibi' must be one of"),
    ],
)
def test_impossible_shapes_are_refused(wrong: dict[str, Any], words: str) -> None:
    good = {"vocab_size": 61, "context": 16, "layers": 3, "width": 32, "heads": 4, "mlp_width": 88}
    assert GPTConfig(**good).key_value_heads == 4
    with pytest.raises(ValueError, match=words):
        GPTConfig(**good | wrong)


def test_learned_positions_of_odd_heads_are_possible() -> None:
    assert GPT2.head_width == 8
    assert GPTConfig(61, 16, 1, 9, 3, 8, positions="learned").head_width == 3
