from __future__ import annotations

import pytest

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.launchers import detect_launch, local

# What one of our strategies gives its second process on the second node.
CHILD = Launch("mpi", 5, 8, 1, 4, 1, 2, "10.0.0.4", 6105)
INHERITED = {
    "AZUREML_RUN_ID": "quirky_plum",
    "AZUREML_NODE_COUNT": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
}


def test_a_child_has_its_own_rank_in_spite_of_its_nodes() -> None:
    assert detect_launch(INHERITED | local.variables(CHILD)) == CHILD


def test_the_process_that_started_it_becomes_local_rank_0() -> None:
    node = detect_launch(INHERITED)
    assert node is not None
    parent = node.with_local_processes(4)
    assert detect_launch(INHERITED | local.variables(parent)) == parent
    assert (parent.rank, parent.local_rank) == (4, 0)


@pytest.mark.parametrize("lost", local.NUMBERS)
def test_half_a_set_is_refused_by_name(lost: str) -> None:
    environ = INHERITED | local.variables(CHILD)
    del environ[lost]
    with pytest.raises(LaunchError, match=f"{lost} is not set.*azureml-strategy wrote it"):
        detect_launch(environ)


def test_torch_and_deepspeed_find_all_five_of_their_variables() -> None:
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= local.variables(CHILD).keys()
