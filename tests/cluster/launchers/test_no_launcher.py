from __future__ import annotations

import pytest

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.launchers import detect_launch

JOB = {"AZUREML_RUN_ID": "quirky_plum"}
# What Lightning's own launcher writes on one machine, in the process it started and in those it starts.
LIGHTNING = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "47057",
    "NODE_RANK": "0",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
}


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="a laptop"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, id="torchrun's names on a laptop"),
        pytest.param({"AZUREML_RUN_ID": "", "AZUREML_NODE_COUNT": "2"}, id="an empty run id"),
        pytest.param(JOB, id="a job of one node"),
        pytest.param({**JOB, "AZUREML_NODE_COUNT": "1", "AZUREML_CR_NODE_RANK": "0"}, id="and its own variables"),
        pytest.param({**JOB, "AZ_BATCHAI_MPI_MASTER_NODE": "localhost"}, id="no proof of MPI"),
        pytest.param({**JOB, **LIGHTNING}, id="a process that Lightning started there"),
        pytest.param({**JOB, "NODE_RANK": "0", "TF_CONFIG": " "}, id="empty TF_CONFIG"),
    ],
)
def test_nothing_to_follow(environ: dict[str, str]) -> None:
    assert detect_launch(environ) is None


@pytest.mark.parametrize(
    "nodes",
    [
        {"AZUREML_NODE_COUNT": "2"},
        {"NODE_COUNT": "2"},
        {"AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5"},
        {"AZ_BATCH_NODE_LIST": "10.0.0.4;10.0.0.5"},
        {"AMLARC_NUM_WORKER": "2"},
        {"VC_WORKER_NUM": "2"},
        {"AZUREML_CR_NODE_RANK": "1"},
        {"AZUREML_NODE_COUNT": "2", **LIGHTNING},
    ],
    ids=lambda nodes: "+".join(nodes),
)
def test_two_nodes_without_a_distribution_block_are_refused(nodes: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match=r"Add to the job: `distribution: \{type: pytorch") as error:
        detect_launch(JOB | nodes)
    assert all(f"{name}=" in str(error.value) for name in nodes)


@pytest.mark.parametrize("half", [{"WORLD_SIZE": "4"}, {"LOCAL_RANK": "1"}, {"MASTER_ADDR": "10.0.0.4"}])
def test_half_of_the_launchers_variables_is_refused(half: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="RANK is not"):
        detect_launch(JOB | half)


@pytest.mark.parametrize("name", ["AZUREML_EXPERIMENT_ID", "AZ_BATCHAI_CLUSTER_NAME", "AMLARC_NUM_WORKER"])
def test_each_sign_of_azure_ml_is_enough(name: str) -> None:
    with pytest.raises(LaunchError):
        detect_launch({name: "2", "AZUREML_NODE_COUNT": "2"})
