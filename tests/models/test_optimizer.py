"""Parameter groups, and what is read from a Trainer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from azureml_strategy.models import ResNet50
from azureml_strategy.models.optimizer import decay_groups, warmup_cosine_schedule


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
