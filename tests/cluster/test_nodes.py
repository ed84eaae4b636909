from __future__ import annotations

import pytest

from azureml_strategy.cluster.errors import LaunchError
from azureml_strategy.cluster.nodes import declared_node_rank, in_azure_ml, main_address, node_count


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, None),
        ({"AZUREML_NODE_COUNT": "3"}, 3),
        ({"NODE_COUNT": "2"}, 2),
        ({"AZUREML_NODE_COUNT": "3", "NODE_COUNT": "2", "AZ_BATCH_HOST_LIST": "a"}, 3),
        ({"AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5,"}, 2),
        ({"AZ_BATCH_NODE_LIST": "node-0;node-1"}, 2),
        ({"AZ_BATCH_HOST_LIST": "", "AZ_BATCH_NODE_LIST": "node-0"}, 1),
        ({"AMLARC_NUM_WORKER": "4"}, 4),
        ({"VC_WORKER_NUM": "4"}, 4),
        ({"AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5", "AMLARC_NUM_WORKER": "4"}, 2),
    ],
)
def test_the_node_count(environ: dict[str, str], count: int | None) -> None:
    assert node_count(environ) == count


def test_no_nodes_is_refused() -> None:
    with pytest.raises(LaunchError, match="AZUREML_NODE_COUNT='0'"):
        node_count({"AZUREML_NODE_COUNT": "0"})


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, None),
        ({"NODE_RANK": "0", "AZUREML_CR_NODE_RANK": "1"}, 0),
        ({"AZUREML_CR_NODE_RANK": "1"}, 1),
        ({"VK_TASK_INDEX": "2"}, 2),
        ({"VC_TASK_INDEX": "3"}, 3),
        ({"OMPI_COMM_WORLD_NODE_RANK": "3", "GROUP_RANK": "3"}, None),
    ],
)
def test_the_declared_node_rank(environ: dict[str, str], rank: int | None) -> None:
    assert declared_node_rank(environ) == rank


@pytest.mark.parametrize(
    ("environ", "nodes", "address"),
    [
        ({}, 1, "127.0.0.1"),
        ({"AZ_BATCHAI_MPI_MASTER_NODE": "localhost"}, 1, "localhost"),
        ({"MASTER_ADDR": "localhost", "AZ_BATCHAI_JOB_MASTER_NODE_IP": "10.0.0.4"}, 1, "10.0.0.4"),
        ({"MASTER_ADDR": "node-0", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, 2, "node-0"),
        ({"MASTER_ADDR": "127.0.0.1", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, 2, "10.0.0.4"),
        ({"MASTER_ADDR": "", "MASTER_IP": "10.0.0.4"}, 2, "10.0.0.4"),
        ({"VC_WORKER_HOSTS": "worker-0.job,worker-1.job"}, 2, "worker-0.job"),
    ],
)
def test_the_main_address(environ: dict[str, str], nodes: int, address: str) -> None:
    assert main_address(environ, nodes, given_by_platform=True) == address


def test_several_nodes_without_an_address_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"MASTER_ADDR='localhost'.*Set MASTER_ADDR to the address of node 0"):
        main_address({"MASTER_ADDR": "localhost"}, 2)


@pytest.mark.parametrize("name", ["AZUREML_RUN_ID", "AZUREML_EXPERIMENT_ID", "AZ_BATCHAI_X", "AMLARC_X"])
def test_azure_ml_is_recognised(name: str) -> None:
    assert in_azure_ml({name: "x"})


@pytest.mark.parametrize("environ", [{}, {"AZUREML_RUN_ID": ""}, {"AZ_BATCH_JOB_ID": "x"}, {"AZURE_ML": "x"}])
def test_other_places_are_not_azure_ml(environ: dict[str, str]) -> None:
    assert not in_azure_ml(environ)


def test_azure_batch_comes_first_where_the_platform_gives_no_address() -> None:
    """Under MPI a script wrote MASTER_ADDR, and perhaps each node its own."""
    environ = {"MASTER_ADDR": "10.0.0.5", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}
    assert main_address(environ, 2) == "10.0.0.4"
    assert main_address({"MASTER_ADDR": "10.0.0.5"}, 2) == "10.0.0.5"
