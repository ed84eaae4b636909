"""Process groups end with their process under every strategy, and leave its exit code as the script wants it."""

from __future__ import annotations

import pytest
from tests.multiprocess.conftest import RunJob

ON_CPU = {"DS_ACCELERATOR": "cpu"}
ALL = [
    *("ddp", "local_sgd", "zero", "model_parallel", "one_stage"),
    *("fabric:azureml_ddp", "fabric:azureml_deepspeed_stage_2", "fabric:azureml_model_parallel"),
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("diloco", "zero_1", "zero_2")),
]


@pytest.mark.parametrize("name", ALL)
def test_the_group_is_destroyed_at_the_end(run_job: RunJob, name: str) -> None:
    job = run_job("ends.py", "end", name, extra=ON_CPU)
    assert job.exit_code == 0, job.output
    assert job.each("left") == [False]


@pytest.mark.parametrize(
    ("how", "name", "code"), [("exit", "zero_2", 3), ("raise", "zero_2", 1), ("sigterm", "ddp", 143)]
)
def test_the_exit_code_is_that_of_the_script(run_job: RunJob, how: str, name: str, code: int) -> None:
    job = run_job("ends.py", how, name, processes_per_node=2, extra=ON_CPU)
    assert job.exit_code == code, job.output
    assert set(job.each("left")) == {False}, "of the rank that ends first; the emulator ends the other"


def test_trainers_of_all_kinds_use_one_group(run_job: RunJob) -> None:
    job = run_job("ends.py", "end", "ddp", "zero_2", "local_sgd", "ddp", processes_per_node=2, extra=ON_CPU)
    assert job.exit_code == 0, job.output
    assert job.each("left") == [False, False]
    assert all(len(set(groups)) == 1 for groups in job.each("groups"))


def test_a_group_of_the_users_is_left_to_him(run_job: RunJob) -> None:
    job = run_job("ends.py", "own", "ddp", extra=ON_CPU)
    assert job.exit_code == 0, job.output
    assert job.each("left") == [True]


def test_a_rank_that_fails_in_a_fit_ends(run_job: RunJob) -> None:
    """The other rank is inside a collective, which it never joins."""
    job = run_job("ends.py", "raise_in_fit", "ddp", processes_per_node=2)
    assert job.exit_code == 1, job.output
    assert "of one rank alone" in job.output
    assert job.results[1]["left"] is False
