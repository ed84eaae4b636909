"""Constructors that set weights of layers that ZeRO-3 has cut: the values are those of a constructor outside of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from azureml_strategy.strategies.deepspeed_internals import forget_groups, zero_init
from azureml_strategy.strategies.zero import construction
from azureml_strategy.strategies.zero.construction import CutView, GatherForUse, place_all_but_parameters
from azureml_strategy.strategies.zero.device import use_device

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
deepspeed = pytest.importorskip("deepspeed")


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """DeepSpeed cuts parameters for one process too: they have no elements until they are gathered."""
    for name in ("LOCAL_RANK", "RANK"):
        monkeypatch.setenv(name, "0")
    use_device("cpu")
    forget_groups()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo", dist_init_required=False)
    yield
    torch.distributed.destroy_process_group()


def build(make: Callable[[], nn.Module], cut: bool) -> nn.Module:
    torch.manual_seed(0)
    if not cut:
        return make()
    with deepspeed.zero.Init(config_dict_or_path=CONFIG), GatherForUse():
        return make()


def values(module: nn.Module) -> dict[str, Tensor]:
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return {name: each.detach().clone() for name, each in module.named_parameters(remove_duplicate=False)}


class Layers(nn.Module):
    """Two layers that are cut by the time that `change` runs, at the end of the constructor."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        change(self)


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(0, 0.02)
        nn.init.ones_(module.bias)


def apply_and_scale(model: Any) -> None:
    """As nanoGPT does: weights that end a residual branch are smaller."""
    model.apply(initialise)
    for name, parameter in model.named_parameters():
        if name.endswith("second.weight"):
            nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * 12))


@torch.no_grad()
def rows_and_sums(model: Any) -> None:
    model.first.weight[1] = 0
    model.first.weight[2:, 1].fill_(3)
    model.first.weight.data[0] = 7
    model.first.bias += model.second.weight.sum(0)
    model.second.bias.copy_(model.first.weight.mean(1)[:4])
    torch.add(model.first.bias, 1, out=model.first.bias)


@torch.no_grad()
def views(model: Any) -> None:
    for part, std in zip(model.first.weight.chunk(2), (1, 2), strict=True):
        nn.init.normal_(part, std=std)
    view = model.second.weight.view(-1)
    view[3] = 1
    view.mul_(2).add_(1)
    model.second.weight.detach().T[0].zero_()
    model.first.bias.copy_(view[:6])


def replace_data(model: Any) -> None:
    model.first.weight.data = torch.full((6, 4), 2.0)
    model.second.weight.data = model.first.weight.data.t().contiguous()


def load_state(model: Any) -> None:
    model.load_state_dict({name: torch.randn(each.shape) for name, each in model.state_dict().items()})


def copies(model: Any) -> None:
    model.third = copy.deepcopy(model.first)
    model.fourth = nn.ParameterList([nn.Parameter(model.first.weight.detach().clone())])
    nn.init.zeros_(model.first.weight)


CHANGES: dict[str, Callable[[Any], object]] = {
    "applied": apply_and_scale,
    "xavier": lambda model: nn.init.xavier_uniform_(model.first.weight, gain=2),
    "orthogonal": lambda model: nn.init.orthogonal_(model.second.weight),
    "kaiming": lambda model: nn.init.kaiming_normal_(model.second.weight, mode="fan_out"),
    "truncated": lambda model: nn.init.trunc_normal_(model.second.weight, std=0.1),
    "sparse": lambda model: nn.init.sparse_(model.second.weight, 0.5),
    "detached": lambda model: model.first.weight.detach().mul_(2).add_(1),
    "rows": rows_and_sums,
    "views": views,
    "data": replace_data,
    "state": load_state,
    "copies": copies,
    "reset": lambda model: model.first.reset_parameters(),
    "vector": lambda model: nn.utils.vector_to_parameters(torch.arange(58.0), model.parameters()),
    "frozen": lambda model: model.first.requires_grad_(False),
    "same_type": lambda model: model.to("cpu", torch.float32),
    "spectral_norm": lambda model: nn.utils.parametrizations.spectral_norm(model.first),
    "encoder": lambda model: setattr(
        model, "third", nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), num_layers=2)
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_weights_are_those_of_a_constructor_outside_of_zero_3(name: str) -> None:
    plain, cut = (build(lambda: Layers(CHANGES[name]), each) for each in (False, True))
    assert cut.second.bias.numel() == 0, "it is cut again"
    expected = dict(plain.named_parameters())
    for key, value in values(cut).items():
        assert value.shape == expected[key].shape, key
        assert torch.equal(value, expected[key]), key
        assert cut.get_parameter(key).requires_grad == expected[key].requires_grad
    assert values(cut).keys() == expected.keys()


def test_what_is_read_is_whole() -> None:
    read: list[Any] = []

    def change(model: Any) -> None:
        weight = model.first.weight
        read.append((weight.shape, weight.data.numel(), len(weight), weight.data.view(-1)[3].item(), weight.dtype))
        read.append((weight.device, weight.is_leaf, weight.data.device, weight.detach().requires_grad))
        read.append((float(weight.norm()), weight.tolist(), torch.zeros_like(weight).shape))

    build(lambda: Layers(change), False)
    build(lambda: Layers(change), True)
    assert read[:3] == read[3:]


def test_tied_weights_stay_one_parameter() -> None:
    def change(model: Any) -> None:
        model.second = nn.Linear(4, 6)
        model.second.weight = model.first.weight
        nn.init.ones_(model.second.weight)

    model: Any = build(lambda: Layers(change), True)
    assert model.second.weight is model.first.weight
    assert values(model)["first.weight"].eq(1).all()


def test_parameters_that_the_author_gathers_are_left_to_the_author() -> None:
    def change(model: Any) -> None:
        with deepspeed.zero.GatheredParameters([model.first.weight], modifier_rank=0):
            model.first.weight.data.fill_(5)
            assert type(model.first.weight.data) is not CutView

    assert values(build(lambda: Layers(change), True))["first.weight"].eq(5).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model, "own", nn.Parameter(model.first.weight)), "Share it: module.own = other.weight"),
        (lambda model: setattr(model, "own", nn.Parameter(model.first.weight.data)), "made of one that ZeRO-3 has cut"),
        (lambda model: nn.utils.parametrizations.weight_norm(model.first), "made of one that ZeRO-3 has cut"),
        (lambda model: setattr(model.first.weight, "data", torch.ones(2, 2)), r"of \(6, 4\) .* to become \(2, 2\)"),
        (lambda model: model.to(torch.bfloat16), r"torch.float32 is to become .* torch.bfloat16"),
    ],
)
def test_what_cannot_be_gathered_for_is_refused(change: Callable[[Any], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(lambda: Layers(change), True)


def test_a_view_that_is_kept_is_refused_when_it_is_used() -> None:
    kept: list[Tensor] = []
    build(lambda: Layers(lambda model: kept.append(model.first.weight.data)), True)
    with pytest.raises(ValueError, match=r"Keep a copy there: weight.detach\(\).clone\(\)"):
        kept[0].sum()


def test_nothing_is_left_behind() -> None:
    with pytest.raises(ValueError, match="Share it"):
        build(lambda: Layers(lambda model: setattr(model, "own", nn.Parameter(model.first.weight))), True)
    nn.Module().register_parameter("empty", nn.Parameter(torch.empty(0)))


def test_transformers_without_accelerate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers.modeling_utils")
    monkeypatch.setattr(construction, "find_spec", lambda name: None)
    with (
        deepspeed.zero.Init(config_dict_or_path=CONFIG),
        pytest.raises(ValueError, match="Type: pip install accelerate"),
        construction.Construction().under(CONFIG),
    ):
        pass


def test_buffers_stay_exact_in_bf16() -> None:
    config = {**CONFIG, "bf16": {"enabled": True}}
    with zero_init(config, None), construction.Construction().under(config):
        assert torch.arange(1000.0)[-1] == 999
        torch.manual_seed(0)
        drawn = nn.Linear(64, 64)
        layer = nn.BatchNorm1d(3)
        layer.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]))
        whole = drawn.weight.detach().clone()
    assert layer.mean.tolist() == pytest.approx([0.485, 0.456, 0.406], rel=1e-7)
    assert layer.running_var.dtype == torch.float32
    assert layer.weight.dtype == whole.dtype == torch.bfloat16
    torch.manual_seed(0)
    assert torch.equal(whole, nn.Linear(64, 64).weight.bfloat16()), "as it is drawn in float32"
    assert torch.arange(4).dtype == torch.int64


class Standardised(nn.Module):
    """Buffers of functions that DeepSpeed does not know, one of them shared, and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.linspace(0, 1, 4), persistent=False)
        self.inner = nn.Module()
        self.inner.register_buffer("mean", self.mean)
        self.inner.register_buffer("offset", self.mean)
        self.error = MeanSquaredError()


def test_buffers_and_metrics_of_a_cut_module_come_to_the_device() -> None:
    module = build(Standardised, cut=True)
    held = [id(each) for each in module.parameters()]
    place_all_but_parameters(module, torch.device("meta"))
    assert {each.device.type for each in (*module.buffers(), module.error.sum_squared_error)} == {"meta"}
    assert module.mean is module.inner.mean is module.inner.offset
    assert "mean" not in module.state_dict()
    assert [id(each) for each in module.parameters()] == held
    assert {each.ds_tensor.device.type for each in module.parameters()} == {"cpu"}
