"""The operators of a step, beside what torch counts on real tensors and the order in which real gradients come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.planning.kernels import kernels_of
from azureml_strategy.planning.networks import Network, named_network
from azureml_strategy.planning.operators import Operators, list_operators


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.shared = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(images))).mean((2, 3))
        return self.last(torch.relu(self.frozen(self.shared(self.shared(hidden)))))  # type: ignore[no-any-return]


def _listed(module: nn.Module, *shape: int) -> Operators:
    inputs = torch.empty(shape, device="meta")
    return list_operators(module.to("meta"), lambda each: each(inputs), shape[0])


def test_operations_and_gradients_are_those_of_a_real_step() -> None:
    module, order = _Small(), list[str]()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(2, 3, 9, 9)).sum().backward()
    found = _listed(_Small(), 2, 3, 9, 9)
    assert found.flops == counter.get_total_flops()
    assert [each.name for each in found.gradients] == order
    assert "frozen.weight" in found.forward_of
    assert "frozen.weight" not in order
    assert found.parameters == sum(each.numel() for each in module.parameters() if each.requires_grad)
    assert all(each.after >= found.backward_from for each in found.gradients)


def test_a_linear_layer_reads_and_writes_what_it_must() -> None:
    found = _listed(nn.Linear(16, 32, bias=False), 8, 16)
    forward = found.listed[0]
    assert (forward.flops, forward.reads, forward.writes, forward.weights) == (2 * 8 * 16 * 32, 128, 256, 512)


def test_groups_of_a_convolution_are_counted_once() -> None:
    found = _listed(nn.Conv2d(8, 8, 3, groups=8, padding=1, bias=False), 2, 8, 6, 6)
    forward, backward = found.listed[0].flops, sum(each.flops for each in found.listed if each.backward)
    assert forward == 2 * 2 * 36 * 8 * 9
    assert backward == forward  # of the weights; the images need no gradient


def test_views_cost_nothing_and_expanded_tensors_lie_in_memory_once() -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4))

        def forward(self, rows: Tensor) -> Tensor:
            return rows.view(2, 2, 4).transpose(0, 1)[0] * self.weight.expand(2, 4)

    found = [each for each in _listed(Viewed(), 4, 4).listed if not each.backward]
    assert [each.name for each in found][:1] == ["mul"]
    assert (found[0].writes, found[0].weights) == (8, 4)


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.project(hidden).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(query, key, value)


def test_attention_is_one_kernel_however_it_is_imported() -> None:
    own = [each.name for each in _listed(_Attends(), 2, 8, 16).listed if each.kind == "attention"]
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    torchs = [each.name for each in _listed(layer, 2, 8, 16).listed if each.kind == "attention"]
    assert own == torchs == ["attention", "attention_backward"]
    assert torch.nn.functional.scaled_dot_product_attention is scaled_dot_product_attention


@pytest.mark.parametrize(
    ("name", "parameters", "gflop"), [("resnet50", 25_557_032, 24.5), ("resnet152", 60_192_808, 69.1)]
)
def test_published_counts_of_resnets(name: str, parameters: int, gflop: float) -> None:
    """torchvision's numbers of parameters, and 4.09 and 11.51 billion multiply-accumulates an image, six times."""
    found = named_network(name)
    assert found.parameters == parameters
    assert found.flops == pytest.approx(gflop * 1e9, rel=0.01)


def test_a_gpt_has_the_operations_of_its_formula() -> None:
    config = GPTConfig(512, 64, 3, 64, 4, 256)
    module = LanguageModel(config)
    with torch.device("meta"):
        module.configure_model()
        tokens = torch.zeros(2, 64, dtype=torch.long)
    found = list_operators(module.to("meta"), lambda each: each(tokens, tokens), 2)
    # The formula has two products of attention backward for each forward; a fused kernel computes scores once more.
    attention = 0.5 * 4 * 64 * 64 * 64 * 3 * 2
    assert found.flops == pytest.approx(config.flops_per_token(64) * 2 * 64 + attention, rel=0.02)


def _megabytes_an_image(network: Network, compiled: bool) -> float:
    kernels = kernels_of(network.operators, compiled)
    return float(kernels.elements.sum()) * 2 / network.operators.samples / 1e6


def test_a_compiler_moves_less_memory() -> None:
    """ResNet-50 in bf16 moves 464 MB an image one kernel after the other, 335 MB with fused elementwise operations: the
    figures were computed by hand from its layers.
    """
    network = named_network("resnet50")
    assert _megabytes_an_image(network, compiled=False) == pytest.approx(464, rel=0.06)
    assert _megabytes_an_image(network, compiled=True) == pytest.approx(335, rel=0.15)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("how", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}])
def test_a_recurrent_layer_is_a_few_calls_with_the_operations_of_its_matrices(make: Any, how: dict[str, Any]) -> None:
    real = make(8, 16, **how)
    rows = torch.randn(5, 5, 8, requires_grad=True)
    # Without oneDNN, torch computes every step of the sequence by itself.
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        output = real(rows)[0]
        output.sum().backward()
    real.zero_grad()
    inputs = torch.empty(5, 5, 8, device="meta", requires_grad=True)
    found = list_operators(real.to("meta"), lambda each: each(inputs)[0], 5)
    layers = how.get("num_layers", 1) * (2 if "bidirectional" in how else 1)
    recurrent = [each for each in found.listed if each.kind == "product"]
    assert [each.backward for each in recurrent] == [False] * layers + [True] * layers
    assert len(found.listed) < 10 + 2 * layers
    # Its first step has a state of zeros, whose gradient nobody needs.
    assert found.flops == pytest.approx(counter.get_total_flops(), rel=0.15)
    assert sorted(each.name for each in found.gradients) == sorted(name for name, _ in real.named_parameters())
    assert recurrent[0].weights == sum(each.numel() for name, each in real.named_parameters() if name.endswith("_l0"))


def test_a_packed_sequence_has_the_rows_that_it_has() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.empty(5, 2, 8), torch.tensor([5, 3]))
    packed = packed._replace(data=packed.data.to("meta"))
    module = nn.LSTM(8, 16).to("meta")
    found = list_operators(module, lambda each: each(packed)[0].data, 2)
    forward, backward = [each.flops for each in found.listed if each.kind == "product"]
    assert (forward, backward) == (2 * (5 + 3) * 4 * 16 * (8 + 16), 2 * forward)
