from __future__ import annotations

import pytest

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.launchers import detect_launch

# Worker 5 of `torchrun --nnodes 2 --nproc-per-node 4`, below a job of two nodes with one process each.
WORKER = {
    "AZUREML_RUN_ID": "quirky_plum",
    "AZUREML_NODE_COUNT": "2",
    "NODE_RANK": "1",  # Azure ML's; torchrun writes the others over it
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "5",
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "29400",
}
LAUNCH = Launch("torchrun", 5, 8, 1, 4, 1, 2, "10.0.0.4", 29400)
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    "below",
    [
        pytest.param({}, id="pytorch"),
        pytest.param({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, id="mpi"),
        pytest.param({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_DEEPSPEED": "true"}, id="accelerate"),
        pytest.param({"NODE_RANK": "0"}, id="elastic agents that met in another order"),
    ],
)
def test_the_innermost_launcher_wins(below: dict[str, str]) -> None:
    assert detect_launch(WORKER | below) == LAUNCH


def test_the_node_count_follows_from_the_others() -> None:
    assert detect_launch({name: WORKER[name] for name in WORKER if name != "GROUP_WORLD_SIZE"}) == LAUNCH


@pytest.mark.parametrize(
    "lost",
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"],
)
def test_half_a_set_is_refused_by_name(lost: str) -> None:
    with pytest.raises(LaunchError, match=lost):
        detect_launch({name: WORKER[name] for name in WORKER if name != lost})


def test_torchrun_on_each_node_alone_is_refused() -> None:
    """`torchrun --nproc-per-node 4 train.py` as the command of a job of two nodes."""
    alone = {"RANK": "1", "WORLD_SIZE": "4", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with pytest.raises(LaunchError, match=r"`torchrun` started processes on 1 node\(s\), but the job has 2"):
        detect_launch(WORKER | alone)


def test_outside_azure_ml_it_is_left_to_lightning() -> None:
    assert detect_launch({name: WORKER[name] for name in WORKER if not name.startswith("AZUREML")}) is None
