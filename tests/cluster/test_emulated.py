from __future__ import annotations

import pytest

from azureml_strategy.cluster.emulated import DISTRIBUTIONS, EmulatedRun, azure_variables, without_job_variables
from azureml_strategy.cluster.environ import SWITCHES, LaunchError
from azureml_strategy.cluster.job import read_job
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.launchers import detect_launch

RUN = EmulatedRun("quirky_plum", "resnet50", "17", "sqlite:///mlflow.db")
LAUNCH = Launch("pytorch", 5, 8, 1, 4, 1, 2, "127.0.0.2", 6105)
ADDRESSES = ["127.0.0.2", "127.0.0.3"]
SHELL = {
    "PATH": "/bin",
    "HOME": "/root",
    "CUDA_VISIBLE_DEVICES": "0",
    "NCCL_DEBUG": "INFO",
    **dict.fromkeys(SWITCHES, "off"),
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_shell_keeps_nothing_of_a_job(distribution: str) -> None:
    inside = SHELL | azure_variables(LAUNCH, distribution, ADDRESSES, RUN, 6105)
    assert without_job_variables(inside) == SHELL


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_job_is_the_emulated_run(distribution: str) -> None:
    variables = azure_variables(LAUNCH, distribution, ADDRESSES, RUN)
    job = read_job(variables)
    assert job is not None
    assert (job.run_id, job.experiment, job.attempt, job.priority) == ("quirky_plum", "resnet50", 0, "dedicated")
    assert variables["MLFLOW_RUN_ID"] == "quirky_plum"
    assert variables["MLFLOW_TRACKING_URI"] == "sqlite:///mlflow.db"


def test_two_nodes_without_a_distribution_block_are_refused_here_too() -> None:
    with pytest.raises(LaunchError, match="Add to the job"):
        detect_launch(azure_variables(LAUNCH, "none", ADDRESSES, RUN))


def test_one_node_without_a_distribution_block_has_no_launch() -> None:
    alone = Launch("none", 0, 1, 0, 1, 0, 1, "127.0.0.2", 6105)
    assert detect_launch(azure_variables(alone, "none", ADDRESSES[:1], RUN)) is None


@pytest.mark.parametrize("distribution", ["mpi", "tensorflow", "none"])
def test_only_pytorch_gives_torchs_variables(distribution: str) -> None:
    variables = azure_variables(LAUNCH, distribution, ADDRESSES, RUN)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"} & variables.keys()


def test_the_traps_of_azure_ml_are_set_too() -> None:
    several = azure_variables(LAUNCH, "mpi", ADDRESSES, RUN)
    assert several["AZ_BATCH_MASTER_NODE"] == "127.0.0.2:6000"
    assert several["OMPI_COMM_WORLD_NODE_RANK"] == "1", "which is the local rank"
    one = azure_variables(Launch("mpi", 0, 1, 0, 1, 0, 1, "127.0.0.2", 6105), "mpi", ADDRESSES[:1], RUN)
    assert one["AZ_BATCHAI_MPI_MASTER_NODE"] == "localhost"
    assert "AZ_BATCH_MASTER_NODE" not in one


def test_a_distribution_that_azure_ml_lacks() -> None:
    with pytest.raises(KeyError):
        azure_variables(LAUNCH, "slurm", ADDRESSES, RUN)
