"""Ranks that wait for rank 0's work on a file."""

from __future__ import annotations

from pathlib import Path

from tests.multiprocess.conftest import RunJob


def test_a_conversion_may_take_longer_than_a_collective_and_its_failure_is_told_to_all(
    run_job: RunJob, tmp_path: Path
) -> None:
    job = run_job("rank_zero.py", nodes=2)
    assert job.exit_code == 0, job.output
    assert job.each("called") == [["converted", "loaded"], ["loaded"]]
    for error in job.each("error"):
        assert "Rank 0 cannot read the checkpoint run for the other ranks: the disk is full." in error
