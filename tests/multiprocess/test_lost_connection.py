"""A rank whose checkpoint-writing thread loses the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.multiprocess.conftest import RunJob


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_connection_costs_no_checkpoint(run_job: RunJob, tmp_path: Path, rank: int) -> None:
    job = run_job("lost_connection.py", rank, tmp_path / "run", nodes=2, extra={"PYTHONWARNINGS": "default"})
    assert job.exit_code == 0, job.output
    assert job.each("complete") == [[8, 6, 4, 2]] * 2, job.output
    assert "No checkpoint" not in job.output
    assert job.each("last") == ["epoch=0-step=8.ckpt"] * 2
    # one for all that the ranks tell one another, and another one for the loser
    assert job.results[1 - rank]["connected"] == 1
    assert job.results[rank]["connected"] == 2
