"""A real torchrun, started by the command of a job with one process on each node."""

from __future__ import annotations

import pytest
from tests.multiprocess.conftest import RunJob


@pytest.mark.parametrize(
    ("strategy", "processes"),
    [
        ("azureml_ddp", 1),
        pytest.param("azureml_ddp", 2, marks=pytest.mark.exhaustive),
        pytest.param("ddp", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_torchrun_over_all_nodes(run_job: RunJob, strategy: str, processes: int) -> None:
    """With Lightning's own ddp as well: the guard must not stop what is right."""
    arguments = {"strategy": strategy, **({"num_nodes": 2, "devices": processes} if strategy == "ddp" else {})}
    job = run_job("under_torchrun.py", 2, processes, arguments, nodes=2)
    assert job.exit_code == 0, job.output
    assert job.each("world_size") == [2 * processes] * 2 * processes
    assert sorted(row for rows in job.each("read") for row in rows) == list(range(64))


@pytest.mark.exhaustive
def test_torchrun_on_each_node_by_itself_is_refused(run_job: RunJob) -> None:
    job = run_job("under_torchrun.py", 1, 1, {"strategy": "azureml_ddp"}, nodes=2)
    assert job.exit_code == 1
    assert "`torchrun` started processes on 1 node(s), but the job has 2" in job.output
    assert not job.results
