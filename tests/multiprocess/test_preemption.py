"""A node is to be taken away: all ranks stop at one step, save, wait, and end or go on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoint.scheduled_events_service import Service, event, events, serving
from tests.multiprocess.conftest import RunJob

STEPS = 80
# For DDP, other tests of this file and tests/faults/test_trials.py see a preemption withdrawn.
STRATEGIES = [
    pytest.param("ddp", marks=pytest.mark.exhaustive),
    "deepspeed_stage_2",
    pytest.param("deepspeed_stage_3", marks=pytest.mark.exhaustive),
    pytest.param("pipeline", marks=pytest.mark.exhaustive),
    pytest.param("model_parallel", marks=pytest.mark.exhaustive),
]
VARIABLE = "AZUREML_STRATEGY_SCHEDULED_EVENTS"


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as service:
        yield service


class Play:
    """Announces a preemption once the ranks train, and acts a second after they have saved."""

    def __init__(self, folder: Path, then: str) -> None:
        self._folder = folder
        self._then = then
        self._saved_at: float | None = None

    def __call__(self) -> bytes:
        if not (self._folder / "training").exists():
            return events()
        if self._saved_at is None and any((self._folder / "saved").glob("*.ckpt")):
            self._saved_at = time.monotonic()
        if self._saved_at is None or time.monotonic() - self._saved_at < 1:
            return events(event("Preempt", 30))
        return self._end()

    def _end(self) -> bytes:
        if self._then == "withdrawn":
            return events()
        pid = int((self._folder / f"pid.{self._then}").read_text())
        os.kill(pid, signal.SIGTERM)
        return events(event("Preempt", None))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_withdrawn(run_job: RunJob, service: Service, tmp_path: Path, strategy: str) -> None:
    service.answer = Play(tmp_path, "withdrawn")
    job = run_job("preemption.py", strategy, '{"saver": "job", "twice": true}', nodes=2, extra={VARIABLE: service.url})
    assert job.exit_code == 0, job.output
    assert job.each("step") == [STEPS] * 2
    assert min(job.each("longest")) > 0.9, "they waited"
    assert job.each("losses") == job.each("undisturbed"), "and nothing else changed"
    assert "All ranks have stopped: Preempt of the node of rank 1, after step " in job.output
    assert "it did not come, and training went on" in job.output


@pytest.mark.parametrize("nodes", [1, 2])
def test_off_the_main_thread(run_job: RunJob, service: Service, tmp_path: Path, nodes: int) -> None:
    """Executors of notebooks, servers and Ray's workers train so: no signal can be caught there, but events can."""
    service.answer = Play(tmp_path, "withdrawn")
    job = run_job("preemption.py", "ddp", '{"threaded": true}', nodes=nodes, extra={VARIABLE: service.url})
    assert job.exit_code == 0, job.output
    assert job.each("step") == [STEPS] * nodes, job.output
    assert min(job.each("longest")) > 0.9, "they waited"
    assert "Traceback" not in job.output


@pytest.mark.parametrize("told", ["0", "1"])
def test_terminated_while_waiting(run_job: RunJob, service: Service, tmp_path: Path, told: str) -> None:
    service.answer = Play(tmp_path, told)
    job = run_job("preemption.py", "ddp", "{}", nodes=2, extra={VARIABLE: service.url})
    assert job.exit_code == 143, job.output
    assert job.each("code") == [143, 143]
    first, second = job.each("step")
    assert first == second < STEPS
    assert [file.name for file in (tmp_path / "saved").iterdir()] == [f"step={first}.ckpt"]


def test_processes_that_the_strategy_started(run_job: RunJob, service: Service, tmp_path: Path) -> None:
    """One node: its first process is told, and asks for both."""
    service.answer = Play(tmp_path, "withdrawn")
    job = run_job("preemption.py", "ddp", '{"devices": 2}', extra={VARIABLE: service.url})
    assert job.exit_code == 0, job.output
    assert job.each("step") == [STEPS] * 2
    assert min(job.each("longest")) > 0.9


def test_between_accumulated_batches_nobody_stops(run_job: RunJob, service: Service, tmp_path: Path) -> None:
    """A checkpoint there would lose gradients."""
    service.answer = Play(tmp_path, "0")
    job = run_job("preemption.py", "ddp", '{"accumulate": 4}', extra={VARIABLE: service.url})
    assert job.exit_code == 143, job.output
    (batches,) = job.each("losses")
    assert len(batches) == 4 * job.each("step")[0]


@pytest.mark.parametrize("saver", ["lightning", "job"])
@pytest.mark.parametrize("validated", [True, False])
def test_a_batch_that_ends_an_epoch_counts_when_that_is_over(
    run_job: RunJob, service: Service, tmp_path: Path, saver: str, validated: bool
) -> None:
    """Where each batch does, there is no other moment."""
    service.answer = Play(tmp_path, "0")
    story = json.dumps({"short": True, "validated": validated, "saver": saver})
    job = run_job("preemption.py", "ddp", story, extra={VARIABLE: service.url})
    assert job.exit_code == 143, job.output
    assert 3 < job.each("step")[0] < STEPS
