"""A real mpirun: its own variables, and Azure's of a job with `distribution: {type: mpi}`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.emulated import free_port
from tests.multiprocess.conftest import RunJob

pytestmark = pytest.mark.skipif(
    not Path(sys.executable).with_name("mpirun").exists(), reason="Open MPI is not installed in this environment"
)


def own_port() -> dict[str, str]:
    """Nobody names one to these jobs; what they would take, another test's job may have."""
    return {"MASTER_PORT": str(free_port())}


@pytest.mark.parametrize("how", ["forked", pytest.param("started", marks=pytest.mark.exhaustive)])
def test_ranks_come_from_mpirun(run_job: RunJob, how: str) -> None:
    job = run_job("under_mpirun.py", how, 2, {"strategy": "azureml_ddp"}, distribution="none", extra=own_port())
    assert job.exit_code == 0, job.output
    assert job.each("world_size") == [2, 2]
    assert sorted(row for rows in job.each("read") for row in rows) == list(range(64))


@pytest.mark.exhaustive
def test_a_stock_trainer_is_guarded(run_job: RunJob) -> None:
    arguments = {"strategy": "auto", "plugin": False}
    job = run_job("under_mpirun.py", "started", 2, arguments, distribution="none", extra=own_port())
    assert job.exit_code != 0
    assert "LaunchError" in job.output
    assert not job.results
