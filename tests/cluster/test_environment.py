"""What Lightning expects of a cluster environment."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from azureml_strategy.cluster.emulated import EmulatedRun, azure_variables
from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.environment import AzureMLEnvironment
from azureml_strategy.cluster.launch import Launch

RUN = EmulatedRun("quirky_plum", "resnet50", "1", "file:mlruns")
ADDRESSES = ["10.0.0.4", "10.0.0.5"]
LAUNCH = Launch("pytorch", 5, 8, 1, 4, 1, 2, "10.0.0.4", 9500)
QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}


@pytest.fixture(autouse=True)
def _rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Trainer tells its rank to the whole process."""
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)


def inside(monkeypatch: pytest.MonkeyPatch, launch: Launch) -> None:
    for name, value in azure_variables(launch, launch.launcher, ADDRESSES[: launch.num_nodes], RUN).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("launcher", ["pytorch", "mpi", "tensorflow"])
def test_attributes_come_from_the_job(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    inside(monkeypatch, Launch(launcher, 5, 8, 1, 4, 1, 2, "10.0.0.4", 6105))
    environment = AzureMLEnvironment()
    assert AzureMLEnvironment.detect()
    assert environment.creates_processes_externally
    assert (environment.main_address, environment.main_port) == ("10.0.0.4", 6105)
    assert (environment.global_rank(), environment.world_size()) == (5, 8)
    assert (environment.local_rank(), environment.node_rank()) == (1, 1)


def test_outside_a_job_it_is_lightnings_own() -> None:
    environment, lightnings = AzureMLEnvironment(), LightningEnvironment()
    assert not AzureMLEnvironment.detect()
    assert not environment.in_job
    with pytest.raises(LaunchError, match="in no distributed Azure ML job"):
        _ = environment.launch
    for each in (environment, lightnings):
        each.set_world_size(6)
        each.set_global_rank(5)
        assert (each.world_size(), each.global_rank(), each.local_rank(), each.node_rank()) == (6, 5, 0, 0)
        assert not each.creates_processes_externally
        assert each.main_address == "127.0.0.1"
    assert environment.main_port == environment.main_port > 0


@pytest.mark.parametrize("maker", [Trainer, Fabric])
def test_a_script_with_the_plugin_runs_on_a_laptop(maker: type) -> None:
    made = maker(plugins=[AzureMLEnvironment()], accelerator="cpu")
    assert (made.world_size, made.global_rank, made.is_global_zero) == (1, 0, True)


@pytest.mark.parametrize("maker", [Trainer, Fabric])
def test_two_nodes_on_a_laptop_are_two_nodes(maker: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the data would be read by nobody if only the environment took them for one."""
    made = maker(plugins=[AzureMLEnvironment()], accelerator="cpu", num_nodes=2, devices=1)
    assert made.world_size == 2
    with pytest.raises(LaunchError, match=r"MASTER_ADDR is not set.*wait for ranks that nobody starts.*azureml_ddp"):
        made.strategy.launcher.launch(lambda: None)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.4")
    monkeypatch.setenv("NODE_RANK", "1")
    environment = AzureMLEnvironment()
    environment.validate_settings(num_devices=1, num_nodes=2)
    assert (environment.main_address, environment.node_rank()) == ("10.0.0.4", 1)


def test_a_launch_can_be_given() -> None:
    assert AzureMLEnvironment(LAUNCH).main_port == 9500


def test_setters_do_nothing_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    environment = AzureMLEnvironment(LAUNCH)
    with caplog.at_level(logging.DEBUG, logger="azureml_strategy.cluster.environment"):
        environment.set_global_rank(5)
        environment.set_world_size(8)
        assert not caplog.records, "the job's own numbers are worth no message"
        environment.set_global_rank(0)
        environment.set_world_size(1)
    assert (environment.global_rank(), environment.world_size()) == (5, 8)
    assert [record.getMessage() for record in caplog.records] == [
        "The job gave this process rank 5; rank 0 is ignored.",
        "The job has 8 processes; a world size of 1 is ignored.",
    ]


def test_teardown_leaves_the_jobs_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    inside(monkeypatch, LAUNCH)
    AzureMLEnvironment().teardown()
    assert AzureMLEnvironment().launch == LAUNCH


def test_a_strategy_may_start_the_other_processes_of_a_node() -> None:
    environment = AzureMLEnvironment(Launch("mpi", 1, 2, 0, 1, 1, 2, "10.0.0.4", 6105))
    environment.start_processes(4)
    assert not environment.creates_processes_externally
    assert (environment.global_rank(), environment.world_size(), environment.local_rank()) == (4, 8, 0)
    environment.validate_settings(num_devices=4, num_nodes=2)


def test_the_trainers_numbers_must_be_the_jobs() -> None:
    environment = AzureMLEnvironment(LAUNCH)
    environment.validate_settings(num_devices=4, num_nodes=2)
    with pytest.raises(LaunchError, match=r"num_nodes=1, devices=8\) wants 8 .* started 8: 4 on each of 2 node"):
        environment.validate_settings(num_devices=8, num_nodes=1)


@pytest.mark.parametrize("launcher", ["pytorch", "mpi", "tensorflow"])
def test_as_a_plugin_of_a_stock_strategy(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    inside(monkeypatch, Launch(launcher, 5, 8, 1, 4, 1, 2, "10.0.0.4", 6105))
    trainer = Trainer(plugins=[AzureMLEnvironment()], strategy="ddp", num_nodes=2, devices=4, **QUIET)
    assert (trainer.global_rank, trainer.world_size) == (5, 8)
    assert (trainer.local_rank, trainer.node_rank, trainer.num_nodes) == (1, 1, 2)
    assert not trainer.is_global_zero
    assert rank_zero_only.rank == 5
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 8, "rank": 5}


def test_lightning_asks_for_the_check_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    inside(monkeypatch, LAUNCH)
    strategy = DDPStrategy()  # the name gives one that knows the job's nodes
    trainer = Trainer(plugins=[AzureMLEnvironment()], strategy=strategy, devices=4, **QUIET)
    assert trainer.strategy.launcher is not None
    with pytest.raises(LaunchError, match="num_nodes=1, devices=4"):
        trainer.strategy.launcher.launch(lambda: None)
