"""A replica that is lost inside a period: named like every lost rank, and the job goes on from its checkpoint."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from tests.multiprocess.conftest import RunJob
from tests.multiprocess.scripts.noisy import curve

HOST = socket.gethostname()


@pytest.mark.parametrize(
    ("rank", "fate"), [(1, "killed"), pytest.param(0, "killed", marks=pytest.mark.exhaustive), (1, "raises")]
)
def test_a_lost_replica_is_named(run_job: RunJob, rank: int, fate: str) -> None:
    """Four steps into a period of sixteen, in which ranks hear nothing of one another by collectives."""
    job = run_job("hangs.py", json.dumps({"rank": rank, "fate": fate, "strategy": "azureml_local_sgd"}), nodes=2)
    assert job.exit_code == 1, job.output
    words = "is gone" if fate == "killed" else "ended first: ValueError: the labels of shard 7 are missing"
    assert f"rank {rank} (node {rank}, host {HOST}) {words}" in job.output


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["azureml_local_sgd", "azureml_diloco"])
def test_a_replica_that_stalls_is_named(run_job: RunJob, strategy: str) -> None:
    story = {"rank": 1, "fate": "loader", "strategy": strategy, "stall_after_s": 2, "kill": True}
    job = run_job("hangs.py", json.dumps(story), nodes=2)
    assert job.exit_code == 75, job.output
    assert f"rank 1 (node 1, host {HOST}) holds up the others" in job.output


@pytest.mark.slow
def test_a_job_whose_replica_was_killed_goes_on_as_if_it_had_not(run_job: RunJob, tmp_path: Path) -> None:
    whole = run_job("local_sgd_killed.py", tmp_path / "whole", nodes=2)
    assert whole.exit_code == 0, whole.output
    killed = run_job("local_sgd_killed.py", tmp_path / "killed", 9, nodes=2)
    assert killed.exit_code != 0
    again = run_job("local_sgd_killed.py", tmp_path / "killed", nodes=2)
    assert again.exit_code == 0, again.output
    assert again.each("began") == [8, 8], "in the middle of the second period, with an exchange under way"
    for key in ("final", "saved"):
        assert again.each(key) == whole.each(key)
    assert curve(tmp_path / "killed" / "curve.jsonl") == curve(tmp_path / "whole" / "curve.jsonl")
