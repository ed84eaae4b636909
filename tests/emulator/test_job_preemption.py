"""A node that is announced to go, goes, and comes back as the job's next attempt."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.emulator.conftest import RunCode

from azureml_strategy.cli import main
from azureml_strategy.cluster.job import read_job
from azureml_strategy.emulator import EmulatedJob, EmulationError, Preemption, processes
from azureml_strategy.emulator.job import announced
from azureml_strategy.preemption.scheduled_events import read_events

# Waits for its node's end in the first attempt, and says what its node was told.
STORY = """
import json, os, signal, sys, time, urllib.request
environ = dict(os.environ)
said = None
signal.signal(signal.SIGTERM, lambda *_: (print("told to end", flush=True), sys.exit(143)))
open("ready." + environ["RANK"], "w").close()
url = environ.get("AZUREML_STRATEGY_SCHEDULED_EVENTS")
while json.loads(environ["AZUREML_CR_COMPUTE_CONTEXT"])["run_attempt_count"] == 0:
    if url and not said:
        request = urllib.request.Request(url, headers={"Metadata": "true"})
        answer = urllib.request.urlopen(request).read().decode()
        if json.loads(answer)["Events"]:
            said = answer
            print(said, flush=True)
            open("told", "w").close()
    time.sleep(0.02)
print(json.dumps(environ), flush=True)
"""


@pytest.fixture(autouse=True)
def _the_power_stays_until_the_processes_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def now() -> float:
        return time.monotonic() if all(Path(name).exists() for name in ("ready.0", "told")) else 0.0

    monkeypatch.setattr(processes, "time", SimpleNamespace(sleep=time.sleep, monotonic=now))


def test_the_last_node_is_told_and_lost_and_the_run_starts_again(run_code: RunCode) -> None:
    job = run_code(STORY, nodes=2, preemption=Preemption(after_s=0.5, notice_s=0))
    assert (job.exit_code, job.status) == (0, "FINISHED")
    assert "node 1 was taken away. The job starts again: same run, attempt 1, 2 node(s)." in job.output
    (surviving, first_again), (announced, second_again) = job.of_rank(0), job.of_rank(1)
    assert surviving == "told to end"
    (event,) = read_events(announced.encode())
    assert (event.kind, event.not_before is not None) == ("Preempt", True)
    assert json.loads(announced)["Events"][0]["NotBefore"].endswith(" GMT"), "as Azure writes it"
    jobs = [read_job(json.loads(line)) for line in (first_again, second_again)]
    assert [(each.attempt, each.priority) for each in jobs if each] == [(1, "low-priority")] * 2
    assert len({each.run_id for each in jobs if each}) == 1
    assert jobs[0] is not None
    assert jobs[0].run_id in job.output.splitlines()[0]


def test_the_node_goes_when_its_notice_is_over() -> None:
    before = time.monotonic()
    with announced(Preemption(after_s=10, notice_s=30), "node 1") as (_, power_cut):
        assert before + 40 <= power_cut.at <= time.monotonic() + 40


def test_it_comes_back_with_fewer_nodes(run_code: RunCode) -> None:
    job = run_code(STORY, nodes=2, preemption=Preemption(after_s=0, notice_s=0), nodes_after=1)
    assert job.exit_code == 0
    assert "attempt 1, 1 node(s)." in job.output
    environ = json.loads(job.of_rank(0)[-1])
    assert (environ["WORLD_SIZE"], environ["AZUREML_NODE_COUNT"]) == ("1", "1")


@pytest.mark.parametrize("options", [{"nodes_after": 1}, {"nodes_after": 0, "preemption": Preemption(20)}])
def test_a_job_comes_back_with_nodes_only_if_it_lost_one(options: dict[str, Any]) -> None:
    with pytest.raises(EmulationError, match=r"1 or more, a job comes back with that loses one. Add --preempt-after"):
        EmulatedJob(["true"], nodes=2, **options)


def test_a_job_that_is_done_before_is_left_alone(run_code: RunCode) -> None:
    job = run_code("print('done')", nodes=2, preemption=Preemption(after_s=60))
    assert (job.exit_code, job.status) == (0, "FINISHED")
    assert "taken away" not in job.output


def test_a_job_that_fails_before_does_not_start_again(run_code: RunCode) -> None:
    job = run_code("raise SystemExit(3)", nodes=2, preemption=Preemption(after_s=60))
    assert (job.exit_code, job.status) == (3, "FAILED")
    assert "taken away" not in job.output


def test_isolated_nodes_cannot_be_told() -> None:
    with pytest.raises(EmulationError, match="Leave --isolate out"):
        EmulatedJob(["true"], isolate=True, preemption=Preemption(20))


@pytest.mark.parametrize("time", ["soon", "20h", "-5s", "s"])
def test_what_is_no_time(capsys: pytest.CaptureFixture[str], time: str) -> None:
    with pytest.raises(SystemExit):
        main(["emulate", f"--preempt-after={time}", "--", "true"])
    assert f"{time!r} is no time. Write 20s, 0.5s or 2m." in capsys.readouterr().err
