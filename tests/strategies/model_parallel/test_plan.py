from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from azureml_strategy.strategies.model_parallel.plan import cut_tensors, match_plan, shared_parameters


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 4)) for _ in range(2))
        self.output = nn.Linear(4, 6, bias=False)
        self.output.weight = self.table.weight


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone: every layer is cut into one part."""
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tensor_parallel",))
    dist.destroy_process_group()


def test_a_star_is_one_part_of_a_name() -> None:
    plan = {"layers.*.0": "colwise", "layers.*.2": "rowwise", "table": "rowwise"}
    names = {f"layers.{layer}.{place}": style for place, style in ((0, "colwise"), (2, "rowwise")) for layer in (0, 1)}
    assert match_plan(Network(), plan) == {**names, "table": "rowwise"}


def test_a_later_pattern_wins() -> None:
    assert match_plan(Network(), {"layers.*.0": "colwise", "layers.1.0": "rowwise"})["layers.1.0"] == "rowwise"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"layers.*.0": "columns"}, "Styles are colwise, colwise_gather_output, rowwise"),
        ({"layers.*": "colwise"}, "layers.0 is a Sequential"),
        ({"layers.*.1": "colwise"}, "layers.0.1 is a ReLU"),
        ({"blocks.*.0": "colwise"}, "names 'blocks.\\*.0', but Network has no such layer"),
        ({"table": "colwise"}, "an nn.Embedding `rowwise`"),
    ],
)
def test_what_is_refused(plan: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        match_plan(Network(), plan)


def test_tied_parameters_stay_one(mesh: DeviceMesh) -> None:
    network = Network()
    cut_tensors(network, mesh, {"table": "rowwise", "output": "colwise_gather_output", "layers.*.0": "colwise"})
    assert network.output.weight is network.table.weight
    assert shared_parameters(network) == [[("table", "weight"), ("output", "weight")]]
    tokens = torch.arange(6)
    assert network.output(network.table(tokens)).shape == (6, 6)


@pytest.mark.parametrize("plan", [{"table": "rowwise"}, {"table": "rowwise", "output": "rowwise"}])
def test_tied_parameters_are_cut_alike(mesh: DeviceMesh, plan: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"table.weight and output.weight are one parameter"):
        cut_tensors(Network(), mesh, plan)
