"""Profiles of two ranks that train by DDP: traces, summaries, artifacts, and requests while they train."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from tests.emulator.conftest import _empty_store
from tests.multiprocess.conftest import Job, RunJob

__all__ = ["_empty_store"]  # a fixture


class Profiled:
    """A job with a real run, and what its ranks have written."""

    def __init__(self, run_job: RunJob, folder: Path) -> None:
        self._run_job, self._folder, self.uri = run_job, folder, f"sqlite:///{folder / 'mlflow.db'}"
        self.client = MlflowClient(self.uri)
        self.run_id = self.client.create_run("0").info.run_id

    def __call__(self, case: str, argument: str = "") -> Job:
        run = {"AZUREML_RUN_ID": self.run_id, "MLFLOW_RUN_ID": self.run_id, "MLFLOW_TRACKING_URI": self.uri}
        job = self._run_job("profiling.py", case, argument, nodes=2, extra=run)
        assert job.exit_code == 0, job.output
        return job

    def artifacts(self) -> list[str]:
        return sorted(each.path for each in self.client.list_artifacts(self.run_id, "profile"))

    def summary(self, rank: int) -> Any:
        return json.loads((self._folder / f"profile/summary_rank_{rank}.json").read_text())

    def traced(self, name: str) -> list[dict[str, Any]]:
        with gzip.open(self._folder / "profile" / name) as file:
            trace = json.load(file)
        assert trace["distributedInfo"]["rank"] == int(name.split("_")[2])
        return trace["traceEvents"]


@pytest.fixture
def profiled(run_job: RunJob, _empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profiled:
    (tmp_path / "mlflow.db").write_bytes(_empty_store.read_bytes())
    monkeypatch.chdir(tmp_path)
    return Profiled(run_job, tmp_path)


def test_traces_of_both_ranks_and_their_exposed_communication(profiled: Profiled) -> None:
    job = profiled("steps", "4-9")
    traces = [f"trace_rank_{rank}_steps_4-9.json.gz" for rank in (0, 1)]
    names = [*(f"summary_rank_{rank}.json" for rank in (0, 1)), *traces]
    assert profiled.artifacts() == [f"profile/{each}" for each in names]
    for rank, name in enumerate(traces):
        steps = {each["name"] for each in profiled.traced(name) if str(each["name"]).startswith("ProfilerStep")}
        assert steps == {f"ProfilerStep#{step}" for step in range(4, 10)}
        summary = profiled.summary(rank)
        assert summary["steps"] == list(range(4, 10))
        parts = ("compute_s", "exposed_communication_s", "copy_s", "idle_s")
        assert sum(summary[each] for each in parts) == pytest.approx(summary["window_s"], abs=1e-5)
        (reduced,) = [each for each in summary["collectives"] if each["name"] == "all_reduce"]
        assert reduced["calls"] >= 6
        assert any(each["name"] == "aten::addmm" for each in summary["operators"])
        assert 0 <= reduced["exposed_s"] <= reduced["total_s"]
    assert job.output.count("Profile of steps 4-9 on rank 0") == 1


@pytest.mark.exhaustive
def test_exposed_communication_is_what_the_reducer_says(profiled: Profiled) -> None:
    job = profiled("steps", "4-9")
    for rank in (0, 1):
        summary = profiled.summary(rank)
        (reduced,) = [each for each in summary["collectives"] if each["name"] == "all_reduce"]
        # DDP tells of a step in the next one. It takes the time in which the call of a collective blocks for overlap.
        by_ddp = sum(job.results[rank]["exposed"][5:11])
        events = profiled.traced(f"trace_rank_{rank}_steps_4-9.json.gz")
        blocked = sum(each["dur"] for each in events if each["name"] == "c10d::allreduce_") / 1e6
        difference = (reduced["exposed_s"] - blocked - by_ddp) / summary["window_s"]
        assert abs(difference) < 0.1, (rank, reduced["exposed_s"], blocked, by_ddp, summary["window_s"])


def test_a_request_while_they_train(profiled: Profiled) -> None:
    job = profiled("request", "steps=3 ranks=0,1 shapes=true")
    answer = Path("profile.answer").read_text()
    assert Path("profile.taken").read_text() == "steps=3 ranks=0,1 shapes=true"
    assert not Path("profile.request").exists()
    first, second = profiled.summary(0)["steps"], profiled.summary(1)["steps"]
    assert first == second
    assert len(first) == 3
    assert answer.splitlines() == [
        f"steps {first[0]}-{first[-1]} of rank {rank}: "
        f"{Path.cwd()}/profile/trace_rank_{rank}_steps_{first[0]}-{first[-1]}.json.gz."
        for rank in (0, 1)
    ]
    name = f"trace_rank_1_steps_{first[0]}-{first[-1]}.json.gz"
    assert any("Input Dims" in each.get("args", {}) for each in profiled.traced(name))
    assert len(profiled.artifacts()) == 4
    assert len(set(job.each("steps"))) == 1


@pytest.mark.exhaustive
def test_a_request_for_a_rank_that_does_not_exist(profiled: Profiled) -> None:
    profiled("request", "ranks=7")
    assert Path("profile.answer").read_text() == (
        "refused: ranks=7: there is no rank 7. This run has 2 processes: ranks 0 to 1.\n"
    )
    assert profiled.artifacts() == []


@pytest.mark.exhaustive
def test_a_signal_to_a_rank_profiles_that_rank(profiled: Profiled) -> None:
    profiled("request")
    assert len(profiled.summary(1)["steps"]) == 5
    assert [each.split("_")[2][0] for each in profiled.artifacts()] == ["1", "1"]


@pytest.mark.exhaustive
def test_a_users_own_profiler_keeps_its_recording(profiled: Profiled) -> None:
    job = profiled("busy", "5-7")
    assert "Rank 1 does not profile steps 5-7: another torch.profiler records already" in job.output
    assert "aten::addmm" in job.results[1]["own"]
    assert profiled.artifacts() == ["profile/summary_rank_0.json", "profile/trace_rank_0_steps_5-7.json.gz"]
