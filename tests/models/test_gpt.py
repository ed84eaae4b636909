"""GPT against transformers' GPT-2 and Llama, with the same weights."""

from __future__ import annotations

import pytest
import torch
from tests.models.gpts import GPT2, LLAMA, network, tokens
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from azureml_strategy.models import GPTConfig
from azureml_strategy.models.gpt import rotate


def _spread(module: nn.Module) -> None:
    """Move every parameter away from its start, so that no gain of one or bias of zero hides a mistake."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)


def _copy(target: nn.Linear | nn.LayerNorm, source: nn.Module, part: int = 0) -> None:
    """Take over weight and bias. GPT-2 keeps matrices transposed, and three of them, its parts, in one."""
    size = target.bias.numel()
    weight = source.weight[..., part * size : (part + 1) * size]
    weight, bias = weight.t(), source.bias[part * size : (part + 1) * size]
    with torch.no_grad():
        target.weight.copy_(weight)
        target.bias.copy_(bias)


def test_forward_equals_gpt2() -> None:
    shape = {"n_positions": 16, "n_layer": 3, "n_embd": 32, "n_head": 4, "n_inner": 128}
    reference = GPT2LMHeadModel(GPT2Config(vocab_size=61, **shape)).eval()
    _spread(reference)
    ours = network(GPT2).eval()
    with torch.no_grad():
        ours[0].weight.copy_(reference.transformer.wte.weight)
        ours[0].positions.weight.copy_(reference.transformer.wpe.weight)
    for block, theirs in zip(ours[1:4], reference.transformer.h, strict=True):
        _copy(block.attention_norm, theirs.ln_1)
        for part, matrix in enumerate((block.attention.query, block.attention.key, block.attention.value)):
            _copy(matrix, theirs.attn.c_attn, part)
        _copy(block.attention.output, theirs.attn.c_proj)
        _copy(block.mlp_norm, theirs.ln_2)
        _copy(block.mlp.up, theirs.mlp.c_fc)
        _copy(block.mlp.down, theirs.mlp.c_proj)
    _copy(ours[4], reference.transformer.ln_f)
    torch.testing.assert_close(ours(tokens()), reference(tokens()).logits, rtol=1e-5, atol=1e-5)


def test_forward_equals_llama() -> None:
    shape = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=61, intermediate_size=88, rms_norm_eps=1e-5, tie_word_embeddings=False, **shape)
    reference = LlamaForCausalLM(config).eval()
    _spread(reference)
    ours = network(LLAMA).eval()
    weights = [reference.model.embed_tokens.weight]
    for layer in reference.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        modules = (layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        modules += (layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        weights += [module.weight for module in modules]
    weights += [reference.model.norm.weight, reference.lm_head.weight]
    with torch.no_grad():
        for parameter, weight in zip(ours.parameters(), weights, strict=True):
            parameter.copy_(weight)
    torch.testing.assert_close(ours(tokens()), reference(tokens()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_no_token_sees_a_later_one(config: GPTConfig) -> None:
    ours, rows = network(config), tokens()
    changed = rows.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    before, after = ours(rows), ours(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=(0, 2)).min() > 1e-4


def test_checkpointed_activations_change_neither_loss_nor_gradients() -> None:
    gradients = []
    for checkpointed in (False, True):
        config = GPTConfig(61, 16, 3, 32, 4, 88, dropout=0.1, checkpoint_activations=checkpointed)
        ours = network(config)
        torch.manual_seed(3)  # of the dropout
        ours(tokens()).logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in ours.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_a_first_forward_under_inference_mode_leaves_training_possible() -> None:
    config = GPTConfig(61, 11, 1, 24, 3, 32, rotary_base=1234.5)  # no other test's table of angles
    ours = network(config)
    with torch.inference_mode():
        ours(tokens(length=11))
    ours(tokens(length=11)).sum().backward()


def test_rotary_angles_stay_exact_in_bfloat16() -> None:
    torch.manual_seed(0)
    states = torch.randn(1, 2, 3000, 8)
    halved = rotate(states.bfloat16(), 10_000.0)
    assert halved.dtype == torch.bfloat16
    torch.testing.assert_close(halved.float(), rotate(states, 10_000.0), rtol=0, atol=0.05)


def test_rotary_angles_in_double_precision_keep_it() -> None:
    states = torch.randn(1, 1, 4002, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angles = 4001 * 10000.0 ** -torch.tensor([0.0, 0.5], dtype=torch.float64)
    first, second = states[0, 0, -1].chunk(2)
    exact = torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()))
    assert torch.allclose(rotate(states, 10000.0)[0, 0, -1], exact, rtol=0, atol=1e-12)
