from __future__ import annotations

import pytest

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.launch import Launch, PartialLaunch, UnknownNodesError
from azureml_strategy.cluster.launchers import detect_launch

JOB = {"AZUREML_RUN_ID": "quirky_plum"}
# Node 1 of 2 with 4 processes each, on AmlCompute.
RANK_5 = {
    **JOB,
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105",
    "AZUREML_NODE_COUNT": "2",
}
LAUNCH = Launch("pytorch", 5, 8, 1, 4, 1, 2, "10.0.0.4", 6105)
# A real job of 2 x 8 on the Singularity back end: host names, another port, other names for the counts.
SINGULARITY = {
    **JOB,
    "RANK": "8",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "0",
    "NODE_RANK": "1",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "9500",
    "NODE_COUNT": "2",
    "GPU_PER_NODE_COUNT": "8",
    "AZ_BATCH_NODE_LIST": "node-0;node-1",
}
KUBERNETES = {
    "AMLARC_NUM_WORKER": "2",
    "AMLARC_NUM_GPU_PER_WORKER": "4",
    "VC_TASK_INDEX": "1",
    "VC_WORKER_NUM": "2",
    "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(RANK_5, LAUNCH, id="several processes a node"),
        pytest.param(
            {**RANK_5, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            Launch("pytorch", 1, 2, 0, 1, 1, 2, "10.0.0.4", 6105),
            id="one process a node",
        ),
        pytest.param(SINGULARITY, Launch("pytorch", 8, 16, 0, 8, 1, 2, "node-0", 9500), id="Singularity"),
        pytest.param(
            without(SINGULARITY, "NODE_COUNT"),
            Launch("pytorch", 8, 16, 0, 8, 1, 2, "node-0", 9500),
            id="Singularity, nodes counted from the list",
        ),
        pytest.param(
            KUBERNETES,
            Launch("pytorch", 5, 8, 1, 4, 1, 2, "job-worker-0.job", 6105),
            id="Kubernetes, worker hosts and index",
        ),
        pytest.param(
            {**KUBERNETES, "MASTER_ADDR": "job-worker-0", "MASTER_PORT": "23456", "NODE_RANK": "1"},
            Launch("pytorch", 5, 8, 1, 4, 1, 2, "job-worker-0", 23456),
            id="Kubernetes, address given",
        ),
    ],
)
def test_each_back_end(environ: dict[str, str], expected: Launch) -> None:
    assert detect_launch(environ) == expected


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        (("LOCAL_RANK",), "rank % processes of a node"),
        (("NODE_RANK",), "rank // processes of a node"),
        (("MASTER_PORT",), "Azure ML's own port"),
    ],
)
def test_what_can_be_mended_is(lost: tuple[str, ...], why: str) -> None:
    assert detect_launch(without(RANK_5, *lost)) == LAUNCH, why


@pytest.mark.parametrize(("rank", "node_rank"), [("1", "0"), ("5", "1")])
def test_without_a_node_count_the_rest_is_known(rank: str, node_rank: str) -> None:
    """A node beyond the first could guess it from its ranks. As node 0 cannot, all of them have to ask."""
    environ = without({**RANK_5, "RANK": rank, "NODE_RANK": node_rank}, "AZUREML_NODE_COUNT")
    with pytest.raises(UnknownNodesError, match=r"set AZUREML_NODE_COUNT to the job's") as error:
        detect_launch(environ)
    assert error.value.known == PartialLaunch(int(rank), 8, 1, int(node_rank), "10.0.0.4", 6105)


def test_without_a_node_count_batchs_port_is_avoided_too() -> None:
    environ = without({**RANK_5, "MASTER_PORT": "6000"}, "AZUREML_NODE_COUNT")
    with pytest.raises(UnknownNodesError) as error:
        detect_launch(environ)
    assert error.value.known.main_port == 6105


def test_without_a_node_count_an_address_that_only_this_node_knows_is_refused_elsewhere() -> None:
    environ = without({**RANK_5, "MASTER_ADDR": "localhost"}, "AZUREML_NODE_COUNT")
    with pytest.raises(LaunchError, match="nothing names an address of the first one"):
        detect_launch(environ)
    with pytest.raises(UnknownNodesError) as error:
        detect_launch(environ | {"RANK": "1", "NODE_RANK": "0"})
    assert error.value.known.main_address == "localhost"


def test_a_rank_beyond_the_world_is_refused_without_asking() -> None:
    environ = without({**RANK_5, "WORLD_SIZE": "4"}, "AZUREML_NODE_COUNT")
    with pytest.raises(LaunchError, match="RANK=5, but WORLD_SIZE=4"):
        detect_launch(environ)


def test_one_process_in_all_is_one_node() -> None:
    environ = {**JOB, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.4"}
    assert detect_launch(environ) == Launch("pytorch", 0, 1, 0, 1, 0, 1, "10.0.0.4", 6105)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK"])
def test_a_variable_that_something_removed_is_named(name: str) -> None:
    with pytest.raises(LaunchError, match=f"{name} is not"):
        detect_launch(without(RANK_5, name))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"NODE_RANK": "0"}, id="node rank overwritten by Lightning"),
        pytest.param({"LOCAL_RANK": "0"}, id="local rank overwritten"),
        pytest.param({"LOCAL_RANK": "4"}, id="local rank beyond the node"),
        pytest.param({"WORLD_SIZE": "7"}, id="nodes with different process counts"),
        pytest.param({"WORLD_SIZE": "4"}, id="rank beyond the world"),
        pytest.param({"AZUREML_NODE_COUNT": "3"}, id="a node count that does not divide the world"),
        pytest.param({"AZUREML_NODE_COUNT": "0"}, id="no nodes"),
        pytest.param({"RANK": "five"}, id="no number"),
        pytest.param({"WORLD_SIZE": "-8"}, id="negative"),
        pytest.param({"MASTER_PORT": "70000"}, id="no port"),
    ],
)
def test_contradictions_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(LaunchError):
        detect_launch(RANK_5 | wrong)


@pytest.mark.parametrize(
    ("polluted", "address", "port"),
    [
        pytest.param({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "47057"}, "10.0.0.4", 6105, id="Lightning"),
        pytest.param({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, "10.0.0.4", 6105, id="torch's defaults"),
        pytest.param({"MASTER_PORT": "6000"}, "10.0.0.4", 6105, id="a script that took Batch's port"),
        pytest.param(
            {"MASTER_ADDR": "10.0.0.4:6000", "MASTER_PORT": "6000"}, "10.0.0.4", 6105, id="a script that did not split"
        ),
        pytest.param({"MASTER_PORT": "29501"}, "10.0.0.4", 29501, id="the user's own port"),
    ],
)
def test_the_rendezvous_survives_pollution(polluted: dict[str, str], address: str, port: int) -> None:
    launch = detect_launch(RANK_5 | {"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"} | polluted)
    assert launch is not None
    assert (launch.main_address, launch.main_port) == (address, port)


def test_an_address_that_only_this_node_knows_is_refused() -> None:
    with pytest.raises(LaunchError, match="nothing names an address of the first one"):
        detect_launch(RANK_5 | {"MASTER_ADDR": "127.0.0.1", "AZ_BATCHAI_MPI_MASTER_NODE": "localhost"})
