"""A rank that dies or stalls ends the job, with the rank, its host and its last collective named."""

from __future__ import annotations

import json
import pickle
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.multiprocess.conftest import Job, RunJob

HOST = socket.gethostname()
NO_NOTES = sys.version_info < (3, 11)


def run(run_job: RunJob, rank: int, fate: str, nodes: int = 2, **story: Any) -> Job:
    return run_job("hangs.py", json.dumps({"rank": rank, "fate": fate, **story}), nodes=nodes)


@pytest.mark.parametrize(
    "strategy",
    [
        "azureml_ddp",
        pytest.param("azureml_deepspeed_stage_2", marks=pytest.mark.exhaustive),
        pytest.param("azureml_model_parallel", marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_that_stalls_is_named(run_job: RunJob, tmp_path: Path, strategy: str) -> None:
    job = run(run_job, 1, "loader", strategy=strategy, stall_after_s=2, kill=True)
    assert job.exit_code == 75, job.output
    assert f"rank 1 (node 1, host {HOST}) holds up the others" in job.output
    assert re.search(r"hangs.py:\d+ in __getitem__\. Its last collective: \w+ #\d+ of ", job.output)
    assert re.search(r"rank 0 in \w+ #\d+ of .* since \d\d:\d\d:\d\d UTC", job.output)
    folder = tmp_path / "logs/hang.attempt_0"
    assert "holds up the others" in (folder / "report.txt").read_text()
    traces = [pickle.loads((folder / f"flight_recorder/rank_{rank}").read_bytes()) for rank in (0, 1)]
    entered = [len(trace["entries"]) for trace in traces]
    assert entered[0] == entered[1] + 1, "as torch's recorder tells it"


@pytest.mark.parametrize(
    ("rank", "fate"),
    [
        (0, "killed"),
        (1, "killed"),
        (0, "killed at once"),
        pytest.param(1, "killed at once", marks=pytest.mark.exhaustive),
        (0, "killed before"),
        pytest.param(1, "killed before", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("machines", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_rank_that_is_killed_is_named(run_job: RunJob, rank: int, fate: str, machines: bool) -> None:
    """Also one of which nothing was heard yet, or that dies before the watches meet.

    Until then, another machine knows no port to ask for a process; that rank 0's store has ended it sees.
    """
    job = run(run_job, rank, fate, machines=machines)
    assert job.exit_code == 1, job.output
    unseen = machines and rank == 1 and fate == "killed before"
    assert (f"rank {rank} (node {rank}, host {HOST}) is gone" in job.output) != unseen
    assert job.results[1 - rank]["exception"] == "RuntimeError"
    assert any(f"rank {rank} (" in note for note in job.results[1 - rank]["notes"]) != unseen or NO_NOTES


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_rank_that_stands_still_is_named(run_job: RunJob, rank: int) -> None:
    job = run(run_job, rank, "stopped", dead_after_s=3, stall_after_s=3, kill=True)
    assert job.exit_code == 75, job.output
    assert f"rank {rank} (node {rank}, host {HOST})" in job.output


@pytest.mark.parametrize(
    ("rank", "fate", "said"),
    [
        (0, "holds the lock", r"has not been heard of for 3 s: its process \d+ is alive, but .*lock \(GIL\)"),
        (1, "holds the lock", r"has not been heard of for 3 s: its process \d+ is alive, but .*lock \(GIL\)"),
        pytest.param(
            0, "stopped", r"for 3 s: its process \d+ is alive, stopped by a signal", marks=pytest.mark.exhaustive
        ),
        (1, "stopped", r"for 3 s: its process \d+ is alive, stopped by a signal or a debugger"),
        (1, "loader", r"holds up the others, which have done nothing for \d+ s"),
    ],
)
def test_a_process_that_is_alive_is_reported_and_trains_to_its_end(
    run_job: RunJob, tmp_path: Path, rank: int, fate: str, said: str
) -> None:
    """Each goes on when the report is there, and not before."""
    job = run(run_job, rank, fate, dead_after_s=60 if fate == "loader" else 3, stall_after_s=3)
    assert job.exit_code == 0, job.output
    assert job.each("finished") == [True, True]
    found = re.findall(rf"rank {rank} \(node {rank}, host {HOST}\) .*{said}", job.output)
    assert found, job.output
    assert not re.search(r"node is gone|is gone", job.output)
    assert re.search(r"Rank \d: the ranks go on, \d+ s after they were reported to hang", job.output)
    assert "Nothing is ended" in job.output or fate == "stopped"
    assert re.search(said, (tmp_path / "logs/hang.attempt_0/report.txt").read_text())


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_the_exception_of_another_rank_is_told(run_job: RunJob, rank: int) -> None:
    job = run(run_job, rank, "raises")
    assert job.exit_code == 1, job.output
    told = f"rank {rank} (node {rank}, host {HOST}) ended first: ValueError: the labels of shard 7 are missing"
    assert told in job.output
    assert job.results[rank] == {"exception": "ValueError", "notes": []}, "which speaks for itself"
    assert any(told in note for note in job.results[1 - rank]["notes"]) or NO_NOTES


def test_what_takes_long_and_goes_on_is_left_alone(run_job: RunJob) -> None:
    job = run(run_job, 0, "none", stall_after_s=1)
    assert job.exit_code == 0, job.output
    assert job.each("finished") == [True, True]
