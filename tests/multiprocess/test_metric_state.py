"""Two ranks, each with its own share of every metric."""

from __future__ import annotations

from pathlib import Path

from tests.multiprocess.conftest import RunJob
from tests.multiprocess.scripts.noisy import curve


def test_each_rank_goes_on_with_its_own_share(run_job: RunJob, tmp_path: Path) -> None:
    """Under DDP each joins its metrics with the other's when they are computed."""
    whole = run_job("measured.py", tmp_path / "whole", 0, nodes=2)
    assert whole.exit_code == 0, whole.output
    assert run_job("measured.py", tmp_path / "ended", 7, nodes=2).exit_code == 0
    again = run_job("measured.py", tmp_path / "ended", 0, nodes=2)
    assert again.exit_code == 0, again.output
    assert again.each("weights") == whole.each("weights")
    for rank in range(2):
        expected = curve(tmp_path / "whole" / f"curve.{rank}.jsonl")
        assert curve(tmp_path / "ended" / f"curve.{rank}.jsonl") == expected
        assert len(expected) > 1000
