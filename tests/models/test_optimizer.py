from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.models import GPTConfig, LanguageModel, ResNet50, scaled_learning_rate, warmup_cosine
from azureml_strategy.models.optimizer import decay_groups, fused, keep_fused, warmup_cosine_schedule

_STEPS = st.integers(0, 5000)


@given(_STEPS, st.integers(0, 1000), st.integers(1, 4000))
def test_it_stays_between_zero_and_one(step: int, warmup: int, total: int) -> None:
    assert 0.0 <= warmup_cosine(step, warmup, total) <= 1.0


@given(st.integers(0, 500), st.integers(1, 500))
def test_it_rises_to_the_peak_then_falls_to_zero(warmup: int, decay: int) -> None:
    factors = [warmup_cosine(step, warmup, warmup + decay) for step in range(warmup + decay + 1)]
    assert factors[: warmup + 1] == sorted(factors[: warmup + 1])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert factors[warmup] == 1.0
    assert factors[-1] == 0.0
    assert all(factor > 0 for factor in factors[:-1])  # no step is wasted


@given(st.integers(1, 500), st.integers(0, 499))
def test_the_warmup_is_linear(warmup: int, step: int) -> None:
    step %= warmup
    assert warmup_cosine(step, warmup, 10 * warmup) == pytest.approx((step + 1) / warmup)


def test_the_decay_is_half_way_down_half_way_through() -> None:
    assert warmup_cosine(60, 20, 100) == pytest.approx(0.5)
    assert warmup_cosine(40, 20, 100) == pytest.approx(0.5 + 0.5**0.5 / 2)


def test_a_run_shorter_than_its_warmup_never_reaches_the_peak() -> None:
    assert [warmup_cosine(step, 10, 3) for step in range(4)] == [0.1, 0.2, 0.3, 0.0]


@given(st.floats(1e-4, 10.0), st.integers(1, 65536))
def test_the_scaling_is_linear(learning_rate: float, batch: int) -> None:
    assert scaled_learning_rate(learning_rate, 256) == pytest.approx(learning_rate)
    assert scaled_learning_rate(learning_rate, 2 * batch) == pytest.approx(
        2 * scaled_learning_rate(learning_rate, batch)
    )


def test_only_convolutions_and_matrices_decay() -> None:
    network = ResNet50(num_classes=10)
    decayed, others = decay_groups(network, 5e-5)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    assert decayed["weight_decay"] == 5e-5
    assert others["weight_decay"] == 0.0
    assert len(decayed["params"]) == 53 + 1  # convolutions and the last matrix
    assert len(others["params"]) == 2 * 53 + 1  # two for each normalisation, and the last bias
    undecayed = {names[id(parameter)] for parameter in others["params"]}
    assert {"bn1.weight", "bn1.bias", "layer4.2.bn3.weight", "fc.bias"} <= undecayed
    assert len(names) == len(decayed["params"]) + len(others["params"])


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    (group,) = decay_groups(layer, 0.1)
    assert group["params"] == [layer.weight]


def test_what_zero_3_leaves_of_a_matrix_still_decays() -> None:
    layer = nn.Linear(2, 2)
    for parameter in layer.parameters():
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)  # as DeepSpeed does
    decayed, others = decay_groups(layer, 0.1)
    assert (decayed["params"], others["params"]) == ([layer.weight], [layer.bias])


def test_the_schedule_follows_the_steps_and_survives_a_checkpoint() -> None:
    sgd = SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = warmup_cosine_schedule(sgd, warmup_steps=2, total_steps=4)["scheduler"]
    rates = []
    for _ in range(4):
        rates.append(sgd.param_groups[0]["lr"])
        sgd.step()
        scheduler.step()
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1.0])
    state = scheduler.state_dict()
    again = warmup_cosine_schedule(SGD([torch.zeros(1, requires_grad=True)], lr=2.0), 2, 4)["scheduler"]
    again.load_state_dict(state)
    assert again.last_epoch == 4


class _OnGPU:
    """What `fused` reads of a parameter, without a GPU."""

    device = torch.device("cuda")

    def __init__(self, mesh: object = None) -> None:
        self.device_mesh = mesh


@pytest.mark.parametrize(
    ("parameters", "chosen", "precision", "expected"),
    [
        ([_OnGPU(), _OnGPU()], None, "bf16-mixed", True),
        ([_OnGPU(), _OnGPU()], None, "16-mixed", None),  # Lightning would refuse to clip gradients
        ([_OnGPU(), _OnGPU()], False, "bf16-mixed", False),
        ([_OnGPU("one"), _OnGPU("one")], None, "32-true", True),
        ([_OnGPU("one"), _OnGPU("other")], None, "32-true", None),
        ([_OnGPU(), torch.zeros(2)], None, "32-true", None),
        ([torch.zeros(2)], None, "32-true", None),
        ([torch.zeros(2)], True, "32-true", True),
    ],
)
def test_one_kernel_takes_a_step_where_a_gpu_can(
    parameters: list[object], chosen: bool | None, precision: str, expected: bool | None
) -> None:
    assert fused(AdamW, [{"params": parameters}], chosen, precision) is expected
    cut = any(getattr(each, "device_mesh", None) for each in parameters)
    assert fused(SGD, [{"params": parameters}], chosen, precision) is (None if cut else expected)


@pytest.mark.parametrize("kind", [AdamW, SGD])
@pytest.mark.parametrize("before", [None, True])
def test_a_loaded_state_does_not_choose_the_kernel(kind: type[AdamW | SGD], before: bool | None) -> None:
    """A run that goes on elsewhere takes the same steps, to rounding, with the kernels of its own device."""

    def make(how: bool | None) -> tuple[nn.Parameter, AdamW | SGD]:
        parameter = nn.Parameter(torch.linspace(-1, 1, 8))
        settings = {"momentum": 0.9, "nesterov": True} if kind is SGD else {}
        optimizer = kind([parameter], lr=0.1, fused=how, **settings)
        keep_fused(optimizer, "32-true")
        return parameter, optimizer

    def step(parameter: nn.Parameter, optimizer: AdamW | SGD) -> None:
        parameter.grad = parameter.detach().sin()
        optimizer.step()

    parameter, optimizer = make(before)
    step(parameter, optimizer)
    other, resumed = make(None if before else True)
    own = resumed.param_groups[0]["fused"]
    other.data.copy_(parameter.detach())
    saved = optimizer.state_dict()
    resumed.load_state_dict(copy.deepcopy(saved))
    assert resumed.param_groups[0]["fused"] is own
    assert saved["param_groups"][0]["fused"] is not own, "the saved state is as it was"
    for _ in range(3):
        step(parameter, optimizer)
        step(other, resumed)
    torch.testing.assert_close(other, parameter, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("saved", [1, 2, 3])
def test_a_state_of_another_number_of_groups_is_refused(saved: int) -> None:
    """As torch does, which would never see the groups that were left out."""

    def make(groups: int) -> AdamW:
        optimizer = AdamW([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(groups)])
        keep_fused(optimizer, "32-true")
        return optimizer

    state, optimizer = make(saved).state_dict(), make(2)
    with nullcontext() if saved == 2 else pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_fused_optimizer_can_have_its_gradients_clipped(precision: str) -> None:
    network = GPTConfig(vocab_size=16, context=8, layers=1, width=8, heads=2, mlp_width=8)
    module = LanguageModel(network, warmup_steps=0, fused=True)
    tokens = torch.randint(0, 16, (4, 9), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=2, precision=precision, gradient_clip_val=0.1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=2))
    assert trainer.optimizers[0].param_groups[0]["fused"]
    assert trainer.global_step == 2
