"""The job's numbers against the Trainer's. What needs GPUs is in none of these tables."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer
from tests.strategies.conftest import EnterJob

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.environment import AzureMLEnvironment
from azureml_strategy.strategies import AzureMLDDPStrategy

CPU = torch.device("cpu")


@pytest.mark.parametrize("distribution", ["pytorch", "mpi", "tensorflow"])
@pytest.mark.parametrize(
    ("job", "typed", "nodes", "world_size", "rank"),
    [
        ((2, 2), (1, 1), 2, 4, 3),  # nothing typed
        ((2, 2), (2, 2), 2, 4, 3),  # the job's own numbers
        ((3, 1), (1, 1), 3, 3, 2),
        ((2, 1), (1, 4), 2, 8, 4),  # one process on each node: the strategy starts three more
        ((2, 1), (2, 4), 2, 8, 4),
    ],
)
def test_the_job_decides(
    enter_job: EnterJob,
    distribution: str,
    job: tuple[int, int],
    typed: tuple[int, int],
    nodes: int,
    world_size: int,
    rank: int,
) -> None:
    enter_job(*job, distribution)
    strategy = AzureMLDDPStrategy()
    strategy.num_nodes, strategy.parallel_devices = typed[0], [CPU] * typed[1]
    assert isinstance(strategy.cluster_environment, AzureMLEnvironment)
    assert strategy.num_nodes == nodes
    assert strategy.parallel_devices == [CPU] * (world_size // nodes)
    assert strategy.cluster_environment.world_size() == world_size
    assert strategy.cluster_environment.global_rank() == rank
    assert strategy.cluster_environment.creates_processes_externally is (world_size == job[0] * job[1])


@pytest.mark.parametrize(
    ("nodes", "devices", "words"),
    [
        (3, 1, r"Trainer\(num_nodes=3\), but the job has 2 node\(s\), as its `pytorch` launcher says. .* to 3"),
        (1, 3, r"Trainer\(devices=3\) on `cpu`, .* started 2 processes on each node.*devices=2.*to 3"),
        (2, 4, r"devices=4"),
    ],
)
def test_another_number_is_refused(enter_job: EnterJob, nodes: int, devices: int, words: str) -> None:
    enter_job(2, 2)
    quiet = {"logger": False, "enable_checkpointing": False}
    with pytest.raises(LaunchError, match=words):
        Trainer(strategy=AzureMLDDPStrategy(), accelerator="cpu", num_nodes=nodes, devices=devices, **quiet)


def test_numbers_that_changed_after_all_are_refused_before_training(enter_job: EnterJob) -> None:
    enter_job(2, 2)
    strategy = AzureMLDDPStrategy()
    strategy.num_nodes, strategy._parallel_devices = 1, [CPU] * 3
    with pytest.raises(LaunchError, match=r"num_nodes=2, devices=3\) wants 6 processes"):
        strategy.setup_environment()


def test_outside_a_job_lightning_decides() -> None:
    strategy = AzureMLDDPStrategy()
    strategy.num_nodes, strategy.parallel_devices = 3, [CPU] * 5
    assert (strategy.num_nodes, len(strategy.parallel_devices), strategy.cluster_environment) == (3, 5, None)


def test_an_environment_that_is_given_wins(enter_job: EnterJob) -> None:
    from lightning.fabric.plugins.environments import LightningEnvironment

    enter_job(2, 2)
    strategy = AzureMLDDPStrategy(cluster_environment=LightningEnvironment())
    strategy.num_nodes = 7
    assert strategy.num_nodes == 7
