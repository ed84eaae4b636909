"""SIGTERM to any rank ends all of them at one step, with an exit code that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.multiprocess.conftest import RunJob


@pytest.mark.parametrize("signalled", ["0", "1", "0,1"])
def test_all_ranks_end_together(run_job: RunJob, tmp_path: Path, signalled: str) -> None:
    job = run_job("sigterm.py", signalled, 1, nodes=2)
    assert job.exit_code == 143, job.output
    assert job.each("exception") == ["SIGTERMException"] * 2
    assert job.each("code") == [143, 143]
    first, second = job.each("step")
    assert first == second
    assert first >= 4  # the signal came during the fourth batch
    saved = torch.load(next(tmp_path.rglob("saved.ckpt")), weights_only=True)
    assert saved["global_step"] == first


@pytest.mark.parametrize("signalled", ["1", "0,1"])
def test_before_the_first_step(run_job: RunJob, signalled: str) -> None:
    """Lightning listens by then, and would wait in a broadcast that no other rank takes part in."""
    job = run_job("sigterm.py", signalled, 1, "early", nodes=2)
    assert job.exit_code == 143, job.output
    first, second = job.each("step")
    assert first == second


def test_single_process(run_job: RunJob) -> None:
    job = run_job("sigterm.py", "0", 1)
    assert job.exit_code == 143, job.output
    assert job.each("step")[0] >= 4


@pytest.mark.parametrize("signalled", ["0", "1"])
def test_processes_that_the_strategy_started(run_job: RunJob, signalled: str) -> None:
    """The platform sees the first process of a node only; the others must not have it killed when they end."""
    job = run_job("sigterm.py", signalled, 2)
    assert job.exit_code == 143, job.output
    assert job.each("code") == [143, 0]
    first, second = job.each("step")
    assert first == second


def test_handlers_of_the_script_are_called_when_the_ranks_have_stopped(run_job: RunJob) -> None:
    job = run_job("sigterm.py", "1", 1, "handlers", nodes=2)
    assert job.exit_code == 143, job.output
    assert job.each("received") == [True, True], "all of them are ended by it"
    handlers = [f"{name}, saved" for name in ("module", "callback", "script")]
    assert job.each("called") == [[], handlers], "of the rank that got it"
    first, second = job.each("step")
    assert first == second


def test_what_a_handler_raises_ends_the_fit(run_job: RunJob) -> None:
    job = run_job("sigterm.py", "0", 1, "raises")
    assert job.exit_code == 1, job.output
    assert job.each("exception") == ["StoppedError"]
    assert job.each("called") == [["script, saved"]]
    assert "has failed" not in job.output
