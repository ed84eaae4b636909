"""Layers that are the same whoever makes them."""

from __future__ import annotations

import pytest
import torch
from tests.models.gpts import GPT2, LLAMA, network

from azureml_strategy.models import GPTConfig, build_chain, gpt_layers


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["tied", "untied"])
def test_each_layer_alone_has_the_parameters_it_has_in_the_whole(config: GPTConfig) -> None:
    whole = network(config, seed=7)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    for layer, module in reversed(list(zip(gpt_layers(config, seed=7), whole, strict=True))):
        torch.testing.assert_close(layer.build().state_dict(), module.state_dict(), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_differ_from_one_another_and_by_seed() -> None:
    first, second = network(LLAMA, seed=7), network(LLAMA, seed=8)
    assert not torch.equal(first[1].mlp.up.weight, first[2].mlp.up.weight)
    assert not torch.equal(first[1].mlp.up.weight, second[1].mlp.up.weight)
    assert not torch.equal(first[0].weight, first[-1].weight)


def test_seeds_beyond_32_bits_differ() -> None:
    first, second = (network(LLAMA, seed=seed)[0].weight for seed in (1, 1 + 2**32))
    assert not torch.equal(first, second)


def test_tied_layers_have_one_parameter() -> None:
    whole = build_chain(gpt_layers(GPT2, seed=0))
    assert whole[0].weight is whole[-1].weight
    assert sum(parameter.numel() for parameter in whole.parameters()) == GPT2.parameters()
    assert [layer.tied for layer in gpt_layers(GPT2, seed=0)] == ["embedding", None, None, None, None, "embedding"]


def test_names_are_unique_and_kinds_count_the_blocks() -> None:
    layers = gpt_layers(LLAMA, seed=0)
    assert len({layer.name for layer in layers}) == len(layers) == 3 + 3
    assert [layer.kind for layer in layers] == ["embedding", "block", "block", "block", "norm", "output"]


def test_the_start_is_gpt2s() -> None:
    ours = network(GPTConfig(500, 64, 8, 128, 4, 512, norm="layernorm", positions="learned", mlp="gelu", bias=True))
    for matrix in (ours[0].weight, ours[0].positions.weight, ours[3].attention.query.weight, ours[3].mlp.up.weight):
        assert matrix.std().item() == pytest.approx(0.02, rel=0.05)
    for matrix in (ours[3].attention.output.weight, ours[3].mlp.down.weight):
        assert matrix.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert ours[3].mlp.up.bias.abs().max() == 0.0
