from __future__ import annotations

import pytest

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.launchers import detect_launch

JOB = {"AZUREML_RUN_ID": "quirky_plum"}
MASTER = {"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}
MVAPICH = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE")


def mpirun(rank: int, size: int, local_rank: int, local_size: int, *names: str) -> dict[str, str]:
    """What mpirun gives a process, under Open MPI's names unless others are given."""
    names = names or tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return JOB | dict(zip(names, map(str, (rank, size, local_rank, local_size)), strict=True))


RANK_11 = {**mpirun(11, 16, 3, 8), **MASTER}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(RANK_11, Launch("mpi", 11, 16, 3, 8, 1, 2, "10.0.0.4", 6105), id="2 x 8"),
        pytest.param({**mpirun(1, 2, 0, 1), **MASTER}, Launch("mpi", 1, 2, 0, 1, 1, 2, "10.0.0.4", 6105), id="2 x 1"),
        pytest.param(
            {**mpirun(3, 4, 3, 4), "AZ_BATCHAI_MPI_MASTER_NODE": "localhost"},
            Launch("mpi", 3, 4, 3, 4, 0, 1, "localhost", 6105),
            id="one node is localhost to Azure ML",
        ),
        pytest.param(mpirun(3, 4, 3, 4), Launch("mpi", 3, 4, 3, 4, 0, 1, "127.0.0.1", 6105), id="one node, no address"),
        pytest.param(
            {**mpirun(0, 1, 0, 1), "AZUREML_NODE_COUNT": "1"},
            Launch("mpi", 0, 1, 0, 1, 0, 1, "127.0.0.1", 6105),
            id="process count left out: rank 0 of 1",
        ),
        pytest.param(
            {**RANK_11, "MASTER_PORT": "29501"},
            Launch("mpi", 11, 16, 3, 8, 1, 2, "10.0.0.4", 29501),
            id="own port",
        ),
    ],
)
def test_open_mpi(environ: dict[str, str], expected: Launch) -> None:
    assert detect_launch(environ) == expected


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param(mpirun(11, 16, 3, 8, *MVAPICH), id="MVAPICH2"),
        pytest.param(mpirun(11, 16, 3, 8, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), id="Intel"),
        pytest.param(mpirun(11, 16, 3, 8, "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"), id="MPICH"),
        pytest.param(
            {**JOB, "PMI_RANK": "11", "PMI_SIZE": "16", "AZUREML_NODE_COUNT": "2"}, id="MPICH without local numbers"
        ),
    ],
)
def test_other_mpirun(environ: dict[str, str]) -> None:
    assert detect_launch(environ | MASTER) == Launch("mpi", 11, 16, 3, 8, 1, 2, "10.0.0.4", 6105)


@pytest.mark.parametrize(
    "address",
    [
        {"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"},
        {"AZ_BATCH_MASTER_NODE": "10.0.0.4"},
        {"AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.4"},
        {"AZ_BATCHAI_JOB_MASTER_NODE_IP": "10.0.0.4"},
        {"MASTER_IP": "10.0.0.4"},
        {"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000", "AZ_BATCHAI_MPI_MASTER_NODE": "localhost"},
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "47057", "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.4"},
        {"MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6000"},
    ],
    ids=lambda address: "+".join(address),
)
def test_every_source_of_the_address_and_never_its_port(address: dict[str, str]) -> None:
    launch = detect_launch(mpirun(11, 16, 3, 8) | address)
    assert launch is not None
    assert (launch.main_address, launch.main_port) == ("10.0.0.4", 6105)


def test_localhost_is_no_address_for_two_nodes() -> None:
    with pytest.raises(LaunchError, match="AZ_BATCHAI_MPI_MASTER_NODE='localhost'"):
        detect_launch({**mpirun(11, 16, 3, 8), "AZ_BATCHAI_MPI_MASTER_NODE": "localhost"})


@pytest.mark.parametrize("node_rank", ["3", "0", "7"])
def test_open_mpis_node_rank_counts_inside_the_node_and_is_ignored(node_rank: str) -> None:
    launch = detect_launch(RANK_11 | {"OMPI_COMM_WORLD_NODE_RANK": node_rank})
    assert launch is not None
    assert launch.node_rank == 1


@pytest.mark.parametrize("rank", range(4))
def test_ranks_dealt_out_over_the_nodes_in_turn_are_refused(rank: int) -> None:
    environ = mpirun(rank, 4, rank // 2, 2) | MASTER
    if rank in (0, 3):  # these have the same numbers either way: the others stop the job
        assert detect_launch(environ) is not None
        return
    with pytest.raises(LaunchError, match="--map-by slot"):
        detect_launch(environ)


@pytest.mark.parametrize("lost", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"])
def test_half_a_set_is_refused_by_name(lost: str) -> None:
    environ = mpirun(3, 4, 3, 4)
    del environ[lost]
    with pytest.raises(LaunchError, match=f"{lost} is not set"):
        detect_launch(environ)


def test_nodes_with_different_process_counts_are_refused() -> None:
    with pytest.raises(LaunchError, match="different numbers of processes"):
        detect_launch(mpirun(0, 6, 0, 4) | MASTER)
    with pytest.raises(LaunchError, match="the job has 2"):
        detect_launch(mpirun(4, 6, 0, 2) | MASTER | {"AZUREML_NODE_COUNT": "2"})


def test_a_mpirun_on_each_node_alone_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"on 1 node\(s\), but the job has 2"):
        detect_launch(mpirun(0, 8, 0, 8) | MASTER | {"AZUREML_NODE_COUNT": "2"})


@pytest.mark.parametrize(
    "polluted",
    [
        pytest.param({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, id="RANK of something else"),
        pytest.param({"NODE_RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "16"}, id="Lightning"),
        pytest.param(
            {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105"},
            id="DeepSpeed's Azure patch on several nodes",
        ),
        pytest.param({"TF_CONFIG": "{}"}, id="TF_CONFIG of something else"),
    ],
)
def test_mpirun_wins_over_what_libraries_wrote(polluted: dict[str, str]) -> None:
    assert detect_launch(RANK_11 | polluted) == Launch("mpi", 11, 16, 3, 8, 1, 2, "10.0.0.4", 6105)


def test_deepspeeds_port_on_one_node_is_the_same_everywhere() -> None:
    """DeepSpeed's Azure patch writes AZ_BATCHAI_MPI_MASTER_NODE and 54965, in every process alike or in none yet."""
    clean = mpirun(3, 4, 3, 4) | {"AZ_BATCHAI_MPI_MASTER_NODE": "localhost"}
    polluted = clean | {"MASTER_ADDR": "localhost", "MASTER_PORT": "54965", "RANK": "3", "WORLD_SIZE": "4"}
    assert detect_launch(polluted) == detect_launch(clean)


def test_mpirun_outside_azure_ml_is_left_to_lightning() -> None:
    environ = RANK_11.copy()
    del environ["AZUREML_RUN_ID"]
    assert detect_launch(environ) is None
