from __future__ import annotations

import pytest

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.launchers import detect_launch

# Process 5 of `deepspeed --no_ssh --node_rank=1 --master_addr=10.0.0.4 ...`, one of four on the second node.
WORKER = {
    "AZUREML_RUN_ID": "quirky_plum",
    "AZUREML_NODE_COUNT": "2",
    "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "LOCAL_SIZE": "4",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "29500",
}
LAUNCH = Launch("deepspeed", 5, 8, 1, 4, 1, 2, "10.0.0.4", 29500)


@pytest.mark.parametrize(
    "below",
    [
        pytest.param({}, id="no distribution block"),
        pytest.param({"NODE_RANK": "1"}, id="pytorch, one process a node"),
        pytest.param({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, id="mpi, one process a node"),
    ],
)
def test_the_innermost_launcher_wins(below: dict[str, str]) -> None:
    assert detect_launch(WORKER | below) == LAUNCH


@pytest.mark.parametrize("lost", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_half_a_set_is_refused_by_name(lost: str) -> None:
    with pytest.raises(LaunchError, match=f"{lost} is not set"):
        detect_launch({name: WORKER[name] for name in WORKER if name != lost})


def test_started_on_each_node_alone_it_is_refused() -> None:
    alone = {"RANK": "1", "WORLD_SIZE": "4", "CROSS_RANK": "0", "CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with pytest.raises(LaunchError, match="the job has 2"):
        detect_launch(WORKER | alone)
