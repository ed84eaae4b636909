"""What one rank can show; tests/multiprocess compares ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from azureml_strategy.strategies.model_parallel.copies import copy_batch, copy_from_rank_zero, uncut_parameters
from azureml_strategy.strategies.model_parallel.plan import cut_tensors
from azureml_strategy.strategies.model_parallel.sharding import is_parallel, shard_parameters


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    dist.destroy_process_group()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(states)))

    training_step = validation_step = test_step = predict_step = forward


def test_what_a_plan_leaves_whole(mesh: DeviceMesh) -> None:
    network = Network()
    assert not is_parallel(network)
    cut_tensors(network, mesh["tensor_parallel"], {"up": "colwise", "down": "rowwise"})
    shard_parameters(network, mesh["data_parallel"], [], "32-true")
    assert is_parallel(network)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    uncut = [names[id(parameter)] for parameter in uncut_parameters(network, "tensor_parallel")]
    assert uncut == ["norm.weight", "norm.bias", "down.bias"]


def test_tensors_without_values_are_left_alone(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        network = Network()
    copy_from_rank_zero(network, torch.device("cpu"))
    assert all(parameter.is_meta for parameter in network.parameters())


def test_a_batch_keeps_its_form(mesh: DeviceMesh) -> None:
    turned = torch.arange(6).view(2, 3).t()  # not contiguous, as gloo needs it
    batch = {"tokens": turned, "names": ["a", "b"], "pair": (torch.ones(1), 2)}
    copied = copy_batch(batch, mesh["tensor_parallel"].get_group())
    assert torch.equal(copied["tokens"], turned)
    assert (copied["names"], copied["pair"][1]) == (["a", "b"], 2)
