"""Tests are of CPUs, also on a machine with GPUs: nothing that they start sees one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.multiprocess.conftest import RunJob, _empty_store, run_job

from azureml_strategy.emulator import EmulatedJob, emulate

__all__ = ["_empty_store", "run_job"]  # fixtures
SAY = "import os; print('sees', repr(os.environ.get('CUDA_VISIBLE_DEVICES')))"


def test_neither_this_process_nor_an_interpreter_sees_one() -> None:
    assert torch.cuda.device_count() == 0
    done = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True)
    assert done.stdout == "sees ''\n"


def test_no_rank_of_a_job_sees_one(run_job: RunJob) -> None:
    """Whether forked, or started by the strategy on each of two nodes, with the variables of a job."""
    job = run_job("fit.py", {"strategy": "azureml_ddp", "devices": 2}, nodes=2)
    assert job.exit_code == 0, job.output
    assert [environ["CUDA_VISIBLE_DEVICES"] for environ in job.each("environ")] == [""] * 4


def test_no_emulated_node_sees_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert emulate(EmulatedJob([sys.executable, "-c", SAY], nodes=2)) == 0
    assert capfd.readouterr().out.count("sees ''") == 2
