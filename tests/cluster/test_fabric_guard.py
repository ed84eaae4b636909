"""Real Fabrics in the environment of one process of a job; tests/multiprocess/test_fabric.py trains with groups."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from azureml_strategy.cluster.emulated import EmulatedRun, azure_variables
from azureml_strategy.cluster.environ import CALLBACKS_SWITCH, GUARD_SWITCH, LAUNCH_SWITCH, LaunchError
from azureml_strategy.cluster.guard import FabricGuard
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.plugin import fabric_callbacks

RUN = EmulatedRun("quirky_plum", "resnet50", "1", "file:mlruns")
CPU: dict[str, Any] = {"accelerator": "cpu"}


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    launch = Launch("pytorch", 1, 2, 0, 1, 1, 2, "10.0.0.4", 6105)
    for name, value in azure_variables(launch, "pytorch", ["10.0.0.4", "10.0.0.5"], RUN).items():
        monkeypatch.setenv(name, value)
    return launch


def train(fabric: Fabric, *, together: bool = True) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, stepping = (
        fabric.setup(model, optimizer) if together else (fabric.setup_module(model), fabric.setup_optimizers(optimizer))
    )
    fabric.backward(wrapped(torch.ones(1, 2)).sum())
    stepping.step()


def guards(fabric: Fabric) -> list[Any]:
    return [each for each in fabric._callbacks if isinstance(each, FabricGuard)]


def test_outside_a_job_there_is_none() -> None:
    fabric = Fabric(**CPU)
    assert guards(fabric) == []
    train(fabric)


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("together", [True, False], ids=["setup", "setup_module"])
def test_a_process_that_would_train_alone_is_stopped(together: bool) -> None:
    fabric = Fabric(**CPU)
    assert len(guards(fabric)) == 1
    with pytest.raises(LaunchError, match=r"This Fabric wants 1 .*train alone.*Write Fabric\(strategy='azureml_ddp'\)"):
        train(fabric, together=together)


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(
    ("nodes", "words"), [(1, "train alone"), (3, "wants 3 .*wait for ranks that nobody starts.*num_nodes=2")]
)
def test_a_wrong_size_is_an_error_before_any_process_waits(nodes: int, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        Fabric(strategy=DDPStrategy(), num_nodes=nodes, **CPU)


@pytest.mark.usefixtures("two_nodes")
def test_the_right_size_passes() -> None:
    assert Fabric(strategy=DDPStrategy(), num_nodes=2, **CPU).world_size == 2
    assert Fabric(strategy="azureml_ddp", **CPU).world_size == 2
    assert Fabric(strategy="ddp", **CPU).world_size == 2


@pytest.mark.usefixtures("two_nodes")
def test_stock_ddp_that_is_kept_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCH_SWITCH, "off")
    with pytest.raises(LaunchError, match=r"with DDPStrategy.*train alone"):
        Fabric(strategy="ddp", **CPU)


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("switch", [GUARD_SWITCH, CALLBACKS_SWITCH])
def test_switched_off_a_fabric_may_train_alone(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv(switch, "off")
    fabric = Fabric(**CPU)
    assert guards(fabric) == []
    train(fabric)


@pytest.mark.usefixtures("two_nodes")
def test_a_rank_may_evaluate_alone_after_a_distributed_training() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fabric = Fabric(**CPU)
        fabric.setup(torch.nn.Linear(2, 1))
        with pytest.raises(LaunchError, match="train alone"):
            train(fabric)
    finally:
        dist.destroy_process_group()


def test_one_that_is_made_elsewhere_knows_no_fabric(two_nodes: Launch) -> None:
    assert isinstance(fabric_callbacks()[0], FabricGuard)
    FabricGuard(two_nodes)  # raises nothing


@pytest.mark.usefixtures("two_nodes")
def test_hooks_of_the_scripts_own_are_not_the_guards() -> None:
    """A `lightning.pytorch.Callback` would have them, with other arguments."""
    fabric = Fabric(strategy="azureml_ddp", **CPU)
    fabric.call("on_train_epoch_end", 3)
    fabric.call("setup")


@pytest.mark.usefixtures("two_nodes")
def test_a_process_without_a_rank_gets_no_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if name in os.environ:
            monkeypatch.delenv(name)
    with pytest.raises(LaunchError, match="RANK is not set"):
        Fabric(**CPU)
