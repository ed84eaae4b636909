"""What hooks change of weights between steps, in the memory that DeepSpeed's optimizers have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.zero.refusals import StartingParameters
from azureml_strategy.strategies.zero.watched_engine import EditedWeights

TRAINED = torch.tensor([0.1, 0.2, 0.3, 0.4])


def engine(part: Tensor, copy: Tensor) -> Any:
    """An engine that has a 16-bit part and the copy that is trained."""
    return SimpleNamespace(
        optimizer=SimpleNamespace(fp16_partitioned_groups_flat=[part], fp32_partitioned_groups_flat=[copy])
    )


def test_an_edited_number_is_trained_and_the_others_keep_their_digits() -> None:
    part, copy = TRAINED.bfloat16(), TRAINED.clone().requires_grad_()
    edited = EditedWeights(engine(part, copy))
    part[1] = 8
    edited.take()
    assert copy.tolist() == [TRAINED[0], 8, TRAINED[2], TRAINED[3]], "0.1 is 0.10009765625 in bfloat16"


def test_a_copy_that_was_set_wins() -> None:
    part, copy = TRAINED.bfloat16(), TRAINED.clone()
    edited = EditedWeights(engine(part, copy))
    copy.data.fill_(2)  # as safe_set_full_fp32_param does; DeepSpeed gives it to the parameter after the step
    edited.take()
    assert copy.tolist() == [2] * 4


def test_a_tensor_in_the_place_of_a_parameters_memory() -> None:
    flat = torch.arange(6.0)
    parameter = nn.Parameter(torch.empty(2, 2))
    parameter.data = flat[1:5].view(2, 2)
    edited = EditedWeights(
        SimpleNamespace(optimizer=SimpleNamespace(bit16_groups=[[parameter]], bit16_groups_flat=[flat]))
    )
    parameter.data = parameter.data.clamp(2, 3)
    edited.take()
    assert flat.tolist() == [0, 2, 2, 3, 3, 5]
    assert parameter.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_frozen_and_unfrozen_parameters_are_named() -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    module[1].requires_grad_(False)
    optimizer = torch.optim.SGD([*module[0].parameters(), *module[1].parameters()], lr=0.1)
    starting = StartingParameters(module, optimizer)
    module[2].requires_grad_(False)  # no optimizer trains it
    starting.require_same()
    module[0].bias.requires_grad_(False)
    module[1].weight.requires_grad_(True)
    with pytest.raises(ConfigurationError, match=r"0\.bias was frozen, 1\.weight was unfrozen after.*lr is 0"):
        starting.require_same()
