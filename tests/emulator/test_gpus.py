"""Which GPUs emulated nodes see. torch's count is made up, so that nothing here needs one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.emulator.conftest import RunCode

from azureml_strategy.emulator import EmulatedJob, EmulationError, enough_gpus
from azureml_strategy.emulator.gpus import share_out
from azureml_strategy.study import run as study
from azureml_strategy.study.options import StudyOptions

VARIABLE = "CUDA_VISIBLE_DEVICES"
PRINT_GPUS = "import json, os; print(json.dumps({'gpus': os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}))"
ON_CPUS = "GPUs: this machine shows 1, too few for 2 processes, and NCCL lets no two share one. So all run on CPUs"


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def seen_by(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


@pytest.mark.parametrize(
    ("gpus", "job", "sees", "told"),
    [
        (0, {"nodes": 2}, ["all", "all"], ""),
        (1, {"nodes": 1}, ["all"], "GPUs: node 0 has 0."),
        (1, {"nodes": 2}, ["-1", "-1"], ON_CPUS),
        (8, {"nodes": 2}, ["0", "1"], "GPUs: node 0 has 0; node 1 has 1."),
        (8, {"nodes": 2, "gpus_per_node": 4}, ["0,1,2,3", "4,5,6,7"], "GPUs: node 0 has 0, 1, 2, 3; node 1 has 4, 5"),
        (3, {"nodes": 1, "processes_per_node": 2}, ["0,1", "0,1"], "GPUs: node 0 has 0, 1."),
        (8, {"nodes": 1, "gpus_per_node": 0}, ["-1"], "GPUs: these nodes have none, and all run on CPUs."),
    ],
)
def test_each_process_has_a_gpu_of_its_own_or_all_run_on_cpus(
    run_code: RunCode, monkeypatch: pytest.MonkeyPatch, gpus: int, job: dict[str, Any], sees: list[str], told: str
) -> None:
    seen_by(monkeypatch, gpus)
    done = run_code(PRINT_GPUS, **job)
    assert done.exit_code == 0, done.output
    assert [each["gpus"] for each in done.json()] == sees
    lines = [line for line in done.output.splitlines() if line.startswith("GPUs: ")]
    assert (len(lines), "".join(lines).startswith(told)) == (bool(told), True), done.output


@pytest.mark.parametrize(
    ("listed", "gpus", "nodes", "values"),
    [
        ("2,5,7", 3, 2, ("2", "5")),
        (" 2, 5 ", 2, 2, ("2", "5")),
        ("GPU-8932f937,GPU-a1b2c3d4", 2, 2, ("GPU-8932f937", "GPU-a1b2c3d4")),
        ("5,99", 1, 2, ("-1", "-1")),  # the second is not there
        ("MIG-1111,MIG-2222", 1, 2, ("-1", "-1")),  # a process sees one part, and NCCL takes two of a GPU for one
        ("MIG-1111,MIG-2222", 1, 1, ()),
        ("", 0, 2, ()),
        ("-1", 0, 2, ()),
    ],
)
def test_a_choice_of_the_users_is_shared_out_as_it_is_named(
    monkeypatch: pytest.MonkeyPatch, listed: str, gpus: int, nodes: int, values: tuple[str, ...]
) -> None:
    monkeypatch.setenv(VARIABLE, listed)
    seen_by(monkeypatch, gpus)
    assert share_out(nodes, 1).values == values


def test_what_amd_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    seen_by(monkeypatch, 2)
    assert [share_out(2, 1).variables(node) for node in range(2)] == [
        {"HIP_VISIBLE_DEVICES": "0"},
        {"HIP_VISIBLE_DEVICES": "1"},
    ]


def test_more_than_there_are_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_by(monkeypatch, 4)
    monkeypatch.setenv(VARIABLE, "0,1,2,3")
    with pytest.raises(EmulationError, match=r"needs 6 GPUs, but torch sees 4 here .CUDA_VISIBLE_DEVICES='0,1,2,3'"):
        share_out(2, 1, 3)
    with pytest.raises(EmulationError, match=r"lets no two share a GPU. Use at least as many as processes, or 0"):
        EmulatedJob(["true"], processes_per_node=2, gpus_per_node=1)


def test_a_job_that_grows_stays_on_its_kind_of_device(run_code: RunCode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs are enough for the first attempt, but the second has three nodes."""
    from azureml_strategy.emulator import Preemption

    seen_by(monkeypatch, 2)
    done = run_code(PRINT_GPUS, nodes=2, preemption=Preemption(60), nodes_after=3)
    assert {json.loads(line)["gpus"] for rank in range(2) for line in done.of_rank(rank)} == {"-1"}


@pytest.mark.parametrize(("gpus", "expected"), [(1, 0), (2, None)])
def test_the_sizes_of_a_study_run_on_one_kind_of_device(
    monkeypatch: pytest.MonkeyPatch, gpus: int, expected: int | None
) -> None:
    seen_by(monkeypatch, gpus)
    made: list[EmulatedJob] = []
    monkeypatch.setattr(study, "_emulate", made.append)
    list(study.emulate_sizes(StudyOptions(command=["true"], nodes=[1, 2], local=True)))
    assert [job.gpus_per_node for job in made] == [expected] * 2
    assert enough_gpus(2, 1) is (expected is None)
