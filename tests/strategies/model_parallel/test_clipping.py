from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing import assert_close

from azureml_strategy.strategies.model_parallel.clipping import clip_gradient_norm
from azureml_strategy.strategies.model_parallel.gradients import warn_of_lost_hooks


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone; tests/multiprocess clips on several ranks."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    dist.destroy_process_group()


def spread(values: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> nn.Parameter:
    parameter = nn.Parameter(DTensor.from_local(torch.zeros_like(values), mesh, placements))
    parameter.grad = DTensor.from_local(values, mesh, placements)
    return parameter


def plain(values: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(values))
    parameter.grad = values
    return parameter


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_one_norm_over_everything(mesh: DeviceMesh, max_norm: float) -> None:
    gradients = [torch.arange(3.0) + place for place in range(4)]
    expected = [plain(gradient.clone()) for gradient in gradients]
    parameters = [
        plain(gradients[0]),
        spread(gradients[1], mesh, Shard(0), Replicate()),
        spread(gradients[2], mesh["data_parallel"], Shard(0)),
        spread(gradients[3], mesh, Shard(0), Shard(0)),
        nn.Parameter(torch.zeros(2)),  # had no part in the loss
    ]
    norm = clip_gradient_norm(parameters, max_norm)
    assert_close(norm, torch.nn.utils.clip_grad_norm_(expected, max_norm))
    assert norm > 1.0
    for parameter, other in zip(parameters, expected, strict=False):
        assert_close(
            parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad, other.grad
        )


def test_sums_that_are_still_to_be_made(mesh: DeviceMesh) -> None:
    """A gradient of a parameter that the user spreads may be partial."""
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate(), Replicate()]))
    parameter.grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, [Replicate(), Partial()])
    assert_close(clip_gradient_norm([parameter], 1.0), torch.tensor(5.0))


def test_nothing_to_clip(mesh: DeviceMesh) -> None:
    assert clip_gradient_norm([nn.Parameter(torch.zeros(2))], 1.0) == 0


def test_hooks_of_parameters_that_are_never_called_are_named() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with pytest.warns(UserWarning, match=r"^weight has a hook .* edit_gradients"):
        warn_of_lost_hooks(layer)
