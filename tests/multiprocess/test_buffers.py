"""Buffers of ranks are those of DDP, in training, in validations and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.multiprocess.conftest import RunJob

STEPS = 3  # of an epoch, of which there are two
Results = dict[str, Any]


@pytest.mark.slow
def test_two_ranks_have_the_buffers_of_ddp(run_job: RunJob, tmp_path: Path) -> None:
    job = run_job("buffers.py", tmp_path, nodes=2)
    assert job.exit_code == 0, job.output
    first, second = job.results[0], job.results[1]
    expected = first["ddp"]
    assert expected["buffers"][1]["network.2.mean"] != expected["buffers"][0]["network.2.mean"], "it moves"
    for name in ("zero_2", "zero_3", "fsdp2", "fsdp2_recomputing", "pipeline"):
        for rank, oracle in ((first, first["ddp"]), (second, second["ddp"])):
            check_numbers(rank[name], oracle, name)
            check_resumed(rank[f"{name}_again"], rank[name], name)
        assert first[name]["buffers"] == second[name]["buffers"], name


def check_numbers(result: Results, oracle: Results, name: str) -> None:
    assert len(result["losses"]) == 2 * STEPS
    assert result["losses"] == pytest.approx(oracle["losses"], rel=1e-5), name
    assert result["val_loss"] == pytest.approx(oracle["val_loss"], rel=1e-5), name


def check_resumed(again: Results, undisturbed: Results, name: str) -> None:
    assert again["losses"] == undisturbed["losses"][STEPS:], name
    assert again["buffers"] == undisturbed["buffers"][1:], name


def test_buffers_that_change_in_unusual_ways(run_job: RunJob) -> None:
    """By `.data`, by another tensor, in their order, late, or to another shape on each rank, which stays its own."""
    job = run_job("equal_buffers.py", nodes=2)
    assert job.exit_code == 0, job.output
    first, second = (job.results[rank]["by_steps"] for rank in (0, 1))
    late = [f"step_{step}" for step in (7, 8)]  # it begins at step 6, and the ranks look again after the eighth
    for moment in first:
        apart = {name for name in first[moment] if first[moment][name] != second[moment][name]}
        allowed = {"grows"} | ({"late"} if moment in late[:1] else set())
        allowed |= set() if moment in ("begun", "used") else {"norm.running_mean", "norm.running_var"}
        assert apart <= allowed, moment
    assert first["step_8"]["by_data"] != first["step_7"]["by_data"] != "[0.0, 0.0]", "they move"
    assert second["used"]["grows"] == str([1.0] * 10), "its own"
    assert [job.results[rank]["counted"]["broadcast"] for rank in (0, 1)] == [0, 0]
    assert {job.results[rank]["after_inference"] for rank in (0, 1)} == {"[1.0, 0.0]"}
