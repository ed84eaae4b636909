"""GPT against transformers' GPT-2 and Llama, with the same weights."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import pytest
import torch
from tests.models.gpts import GPT2, LLAMA, network, tokens
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from azureml_strategy.models import GPTConfig
from azureml_strategy.models.gpt import Block, CausalSelfAttention, NormalLinear, called_plainly, joined, rotate


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


@pytest.mark.parametrize("bias", [True, False])
def test_one_product_gives_queries_keys_and_values(bias: bool) -> None:
    """The numbers and gradients of three products; autocast, in whose 16 bits they are equal too, asks for one."""
    layers = [NormalLinear(32, width, bias, std=0.5) for width in (32, 16, 16)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    hidden = torch.randn(2, 5, 32, requires_grad=True)
    found, expected = joined(hidden, layers), [layer(hidden) for layer in layers]
    torch.testing.assert_close(list(found), expected, rtol=1e-6, atol=1e-6)
    slopes = [torch.randn_like(states) for states in expected]
    torch.testing.assert_close(
        torch.autograd.grad(found, [hidden, *parameters], slopes),
        torch.autograd.grad(expected, [hidden, *parameters], slopes),
        rtol=1e-6,
        atol=1e-5,
    )


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_under_autocast_attention_is_that_of_three_products(config: GPTConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    attention, hidden = CausalSelfAttention(config), torch.randn(2, 16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        calls = len(_products(attention, hidden))
        merged = attention(hidden)
        monkeypatch.setattr("azureml_strategy.models.gpt.called_plainly", lambda layer: False)
        assert (calls, len(_products(attention, hidden))) == (2, 4)
        torch.testing.assert_close(attention(hidden), merged, rtol=1e-2, atol=1e-4)
    monkeypatch.undo()
    assert len(_products(attention, hidden)) == 4, "a copy of the matrices would be kept"


@pytest.mark.parametrize("without", [["key"], ["query", "value"], ["query", "key", "value"]])
def test_under_autocast_attention_may_lack_biases(without: list[str]) -> None:
    """GPT-2's, whose keys need none, as a bias of theirs changes no attention."""
    attention, hidden = CausalSelfAttention(GPT2), torch.randn(2, 16, 32)
    for name in without:
        getattr(attention, name).bias = None
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(hidden)
    torch.testing.assert_close(found.float(), attention(hidden), rtol=5e-2, atol=1e-3)


def _products(module: nn.Module, hidden: torch.Tensor) -> list[str]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                noted.append(str(function))
            return function(*args, **(kwargs or {}))

    noted: list[str] = []
    with Noting(), torch.no_grad():
        module(hidden)
    return noted


def _watch(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda *_: None)


def _prune(layer: nn.Module) -> None:
    torch.nn.utils.prune.l1_unstructured(layer, "weight", 0.5)


def _parametrize(layer: nn.Module) -> None:
    torch.nn.utils.parametrizations.spectral_norm(layer)


def _replace(layer: nn.Module) -> None:
    layer.forward = torch.zeros_like


@pytest.mark.parametrize(
    "change",
    [
        _watch,
        _prune,
        _parametrize,
        _replace,
        lambda layer: layer.register_forward_pre_hook(lambda *_: None),
        lambda layer: layer.register_full_backward_hook(lambda *_: None),
        lambda layer: layer.compile(backend="eager"),
        lambda layer: setattr(layer, "__class__", type("Quantized", (NormalLinear,), {})),
    ],
)
def test_a_layer_that_somebody_watches_or_changes_is_called(change: Callable[[nn.Module], None]) -> None:
    layer = NormalLinear(8, 8, bias=True)
    assert called_plainly(layer)
    change(layer)
    assert not called_plainly(layer)


def test_hooks_of_all_modules_see_queries_too() -> None:
    layer = NormalLinear(8, 8, bias=True)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not called_plainly(layer)
    handle.remove()
    assert called_plainly(layer)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_a_block_compiles_without_a_break(checkpointed: bool, autocast: bool) -> None:
    """Rotary positions included. Another batch size is one graph more, and then any."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    block = Block(dataclasses.replace(LLAMA, checkpoint_activations=checkpointed))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        compiled(torch.randn(2, 16, 32))  # as Lightning's first validation does
    counters.clear()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (2, 2, 3, 4):
            hidden = torch.randn(rows, 16, 32, requires_grad=True)
            expected = torch.autograd.grad(block(hidden).sum(), [hidden, *block.parameters()])
            found = torch.autograd.grad(compiled(hidden).sum(), [hidden, *block.parameters()])
            tolerance = 1e-2 if autocast else 1e-5
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert counters["stats"]["unique_graphs"] <= 2
