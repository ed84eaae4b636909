"""Environments of Azure ML processes, real and documented; each file in samples/ names its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from azureml_strategy.cluster.environ import LaunchError, node_count
from azureml_strategy.cluster.launchers import detect_launch

FILES = sorted((Path(__file__).parent / "samples").glob("*.json"))
ATTRIBUTES = {"master_addr": "main_address", "master_port": "main_port"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sample(path: Path) -> None:
    sample: dict[str, Any] = json.loads(path.read_text())
    expected = {name: value for name, value in sample["expected"].items() if value is not None}
    try:
        launch = detect_launch(sample["env"])
    except LaunchError:
        assert sample.get("alternative"), "only a sample that allows a refusal may be refused"
        assert node_count(sample["env"]) in (None, sample["expected"]["num_nodes"])
        return
    assert launch is not None
    assert launch.main_port != 6000
    if "master_port_rule" in sample:  # any fixed port will do; ours is the conventional one
        expected["master_port"] = 6105
    assert {name: getattr(launch, ATTRIBUTES.get(name, name)) for name in expected} == expected


def test_the_samples_are_there() -> None:
    assert len(FILES) == 6


@pytest.mark.parametrize("rank", range(6))
def test_azure_wins_over_lightning_in_the_whole_form_of_sample_01(rank: int) -> None:
    """The public printout ends before the rest of mpirun's variables; they are known from 3 nodes x 2 processes."""
    polluted = json.loads(FILES[0].read_text())["env"]
    mpirun = {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "6",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": str(rank % 2),
    }
    launch = detect_launch(polluted | mpirun)
    assert launch is not None
    assert (launch.launcher, launch.rank, launch.world_size) == ("mpi", rank, 6)
    assert (launch.node_rank, launch.num_nodes) == (rank // 2, 3)
    assert (launch.local_rank, launch.local_world_size) == (rank % 2, 2)
    assert (launch.main_address, launch.main_port) == ("10.0.0.4", 6105)
