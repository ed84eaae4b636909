"""Modules with float32 buffers on 16-bit weights, as DeepSpeed and FSDP2 have them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from torch import Tensor, nn

from azureml_strategy.strategies import AzureMLDeepSpeedStrategy
from azureml_strategy.strategies.activation_checkpointing import checkpointed
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.mixed_precision import (
    float32_buffers,
    mix_precision,
)

IMAGES = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
ROWS = IMAGES.flatten(1)[:, :8]
ON_CPU: Any = {"accelerator": CPUAccelerator(), "parallel_devices": [torch.device("cpu")]}
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class Scaled(nn.Module):
    """`(x - self.mean) / self.std`, and a layer that gets the float32 result."""

    def __init__(self, layer: nn.Module, features: int = 8) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((features,), 0.1))
        self.register_buffer("std", torch.full((features,), 1.3))
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer((inputs - self.mean) / self.std)
        return outputs[0] if isinstance(outputs, tuple) else outputs


def convolution(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "batch_norm": (lambda: convolution(nn.BatchNorm2d(4)), IMAGES),
    "batch_norm_first": (lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 5)), ROWS),
    "cumulative": (lambda: convolution(nn.BatchNorm2d(4, momentum=None)), IMAGES),
    "without_weights": (lambda: convolution(nn.BatchNorm2d(4, affine=False)), IMAGES),
    "without_statistics": (lambda: convolution(nn.BatchNorm2d(4, track_running_stats=False)), IMAGES),
    "instance_norm": (lambda: convolution(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), IMAGES),
    "linear": (lambda: Scaled(nn.Linear(8, 5)), ROWS),
    "layer_norm": (lambda: Scaled(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 5))), ROWS),
    "group_norm": (lambda: Scaled(nn.Sequential(nn.GroupNorm(2, 8), nn.Linear(8, 5))), ROWS),
    "rms_norm": (lambda: Scaled(nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 5))), ROWS),
    "prelu": (lambda: Scaled(nn.Sequential(nn.PReLU(), nn.Linear(8, 5))), ROWS),
    "lstm": (lambda: Scaled(nn.LSTM(8, 5)), ROWS),
    "attention": (lambda: Scaled(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)), ROWS),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 5)), ROWS),
}


def in_bf16(module: nn.Module) -> nn.Module:
    """As DeepSpeed casts it: parameters, and no buffers."""
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()
    return module


def mixed(module: nn.Module) -> Callable[[], None]:
    return mix_precision(in_bf16(module), "bf16-mixed", "cpu", bool(float32_buffers(module)))


def trained(module: nn.Module, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    outputs = module(inputs)
    outputs.float().pow(2).mean().backward()
    return outputs.detach().float(), [parameter.grad.float() for parameter in module.parameters()]


def close(found: Tensor, expected: Tensor) -> bool:
    """Within the rounding of bfloat16, of 8 bits, over a few operations."""
    return torch.allclose(found, expected, rtol=0.05, atol=0.03 * float(expected.abs().max()))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_as_under_autocast(name: str) -> None:
    make, inputs = MODULES[name]
    torch.manual_seed(0)
    module, oracle = make(), None
    oracle = make()
    oracle.load_state_dict(module.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        expected, gradients = trained(oracle, inputs)
    mixed(module)
    given = inputs if float32_buffers(module) else inputs.bfloat16()
    found, own = trained(module, given)
    assert close(found, expected)
    assert all(map(close, own, gradients))
    for (place, buffer), wanted in zip(module.named_buffers(), oracle.buffers(), strict=True):
        assert buffer.dtype == wanted.dtype, place
        assert close(buffer.float(), wanted.float()), place
    with torch.no_grad():
        assert close(module.eval()(given).float(), oracle.eval()(inputs))


@pytest.mark.parametrize("name", MODULES)
def test_the_module_is_what_it_was_afterwards(name: str) -> None:
    module = MODULES[name][0]()
    before = [(dict(each.__dict__), dict(each._forward_pre_hooks)) for each in module.modules()]
    undo = mixed(module)
    undo()
    after = [(dict(each.__dict__), dict(each._forward_pre_hooks)) for each in module.modules()]
    assert [state.keys() for state, _ in before] == [state.keys() for state, _ in after]
    assert [hooks for _, hooks in before] == [hooks for _, hooks in after]


def test_a_module_without_such_buffers_runs_as_before() -> None:
    """No hook, no autocast, no other forward: what it keeps for the backward pass is what it kept."""
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(), nn.Linear(8, 5))
    module.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    assert float32_buffers(module) == []
    before = [dict(each.__dict__) for each in module.modules()]
    mixed(module)
    assert [dict(each.__dict__) for each in module.modules()] == before


def test_the_tables_of_transformers_are_left_to_its_code() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=8
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert any("inv_freq" in name for name, _ in model.named_buffers())
    assert float32_buffers(model) == []
    model.register_buffer("scale", torch.ones(1))
    assert float32_buffers(model) == ["scale"]


def test_statistics_in_16_bits_are_left_alone() -> None:
    """In bf16-true Lightning has cast all, and torch computes with it."""
    module = nn.BatchNorm1d(8).bfloat16()
    mix_precision(module, "bf16-mixed", "cpu", autocast=False)
    module(ROWS.bfloat16()).sum().backward()
    assert module.running_mean.dtype == torch.bfloat16


def test_an_error_in_the_step_ends_autocast() -> None:
    module = Scaled(nn.Linear(8, 5))
    mixed(module)
    with pytest.raises(RuntimeError):
        module(torch.randn(3, 9))
    assert not torch.is_autocast_enabled("cpu")
    assert "weight" not in module.layer.__dict__


def test_a_compiled_normalisation_has_no_graph_break() -> None:
    module = MODULES["batch_norm"][0]()
    mixed(module)
    eager = module(IMAGES.bfloat16())
    module[1].reset_running_stats()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(IMAGES.bfloat16()), eager)


def test_spectral_norm_of_the_old_kind_is_refused_on_a_cpu() -> None:
    module = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 5)))
    with pytest.raises(ConfigurationError, match=r"0 has torch.nn.utils.spectral_norm.*parametrizations.spectral_norm"):
        mix_precision(module, "bf16-mixed", "cpu", autocast=True)
    mix_precision(module, "bf16-mixed", "cuda", autocast=True)


@pytest.mark.parametrize(
    "step",
    [
        lambda: in_bf16(nn.Linear(8, 5))(ROWS),
        lambda: in_bf16(nn.LayerNorm(8))(ROWS),
        lambda: in_bf16(nn.LSTM(8, 5))(ROWS),
        lambda: in_bf16(nn.Conv2d(3, 4, 3))(IMAGES),
        lambda: nn.functional.scaled_dot_product_attention(IMAGES, IMAGES, IMAGES.bfloat16()),
    ],
)
def test_a_float32_tensor_that_the_step_makes_is_explained(step: Callable[[], Any]) -> None:
    strategy = AzureMLDeepSpeedStrategy(precision_plugin=DeepSpeedPrecision("bf16-mixed"), **ON_CPU)
    module = nn.Linear(8, 5)
    strategy.mix_precision(module, autocast=False)
    with pytest.raises(ConfigurationError, match="autocast=True as an argument"), strategy.two_types_explained():
        step()
    strategy.mix_precision(module, autocast=True)
    with pytest.raises((RuntimeError, ValueError)) as kept, strategy.two_types_explained():
        step()
    assert not isinstance(kept.value, ConfigurationError)


@pytest.mark.parametrize(
    "message",
    [
        "the lengths should be the same",
        "Input type (torch.FloatTensor) and weight type (torch.cuda.BFloat16Tensor) should be the same",
    ],
)
def test_an_error_of_another_kind_stays_as_it_is(message: str) -> None:
    """The user's own, and that of a tensor which was left on the host."""
    strategy = AzureMLDeepSpeedStrategy(precision_plugin=DeepSpeedPrecision("bf16-mixed"), **ON_CPU)
    strategy.mix_precision(nn.Linear(8, 5), autocast=False)
    with pytest.raises(ValueError, match="should be the same") as kept, strategy.two_types_explained():
        raise ValueError(message)
    assert not isinstance(kept.value, ConfigurationError)


def test_a_batch_is_left_alone_under_autocast_and_by_a_plugin_of_the_users_own() -> None:
    class Own(DeepSpeedPrecision):
        def convert_input(self, data: Any) -> Any:
            return "own"

    for plugin, converted in ((DeepSpeedPrecision("bf16-mixed"), ROWS), (Own("bf16-mixed"), "own")):
        strategy = AzureMLDeepSpeedStrategy(precision_plugin=plugin, **ON_CPU)
        strategy.mix_precision(nn.Linear(8, 5), autocast=True)
        used = strategy.precision_plugin
        assert (used is plugin) == isinstance(plugin, Own), "Lightning's own is replaced by one that knows of gradients"
        assert used.convert_input(ROWS) is converted
        assert strategy._restore_module is not None
        strategy._restore_module()
        assert "convert_input" not in used.__dict__


def test_an_interrupted_step_leaves_no_autocast_behind() -> None:
    class Interrupted(Scaled):
        def forward(self, inputs: Tensor) -> Tensor:
            raise KeyboardInterrupt

    module = Interrupted(nn.Linear(8, 5))
    undo = mixed(module)
    with pytest.raises(KeyboardInterrupt):
        module(ROWS)
    undo()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("kind", NORMS)
def test_a_batch_counts_once_where_activations_are_computed_again(kind: type[nn.Module]) -> None:
    shape = {"1": (4, 3, 5), "2": (4, 3, 5, 5), "3": (4, 3, 2, 2, 2)}[kind.__name__[-2]]
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
    plain, again = (kind(3, affine=True, track_running_stats=True) for _ in range(2))
    plain(inputs).pow(3).sum().backward()
    expected, inputs.grad = inputs.grad, None
    run = partial(checkpointed(again), again)
    run(inputs).pow(3).sum().backward()
    assert torch.equal(inputs.grad, expected)
    assert all(map(torch.equal, again.buffers(), plain.buffers()))
    assert again.track_running_stats
