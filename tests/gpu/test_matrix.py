"""The matrix of `make test-gpu` on CPUs: what trains under stock Lightning trains under each strategy of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gpu.agreement import judge, read, table
from tests.gpu.matrix import LAYOUTS, cells
from tests.multiprocess.conftest import RunJob, _empty_store, run_job

__all__ = ["_empty_store", "run_job"]  # fixtures
SCRIPT = Path(__file__).with_name("matrix.py")


@pytest.mark.slow
def test_every_cell_agrees_with_stock_lightning(run_job: RunJob, tmp_path: Path) -> None:
    jobs = {}
    for world in (1, 2):
        job = run_job(SCRIPT, tmp_path / str(world), nodes=world)
        assert job.exit_code == 0, job.output
        jobs[world] = read(tmp_path / str(world), world)
    verdicts = judge(jobs, cells(list(LAYOUTS), "cpu"))
    assert all(verdict.right for verdict in verdicts), "\n" + table(verdicts)
