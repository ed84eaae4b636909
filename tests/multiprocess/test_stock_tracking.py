"""Scripts that do not mention tracking, in emulated jobs: what stands in the job's run, and that it is the only run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from tests.emulator.conftest import _empty_store
from tests.multiprocess.conftest import Job, RunJob
from tests.tracking.server import Server

from azureml_strategy.cluster.environ import THROUGHPUT_SWITCH, TRACKING_SWITCH

__all__ = ["_empty_store"]  # a fixture
STEPS = 16  # 64 rows in batches of 4 on two ranks, twice
SUMMARY = "summary/samples_per_second"


class Tracked:
    """A job with a real run, and a way to run a script in it."""

    def __init__(self, run_job: RunJob, folder: Path) -> None:
        self._run_job, self.uri = run_job, f"sqlite:///{folder / 'mlflow.db'}"
        self.client = MlflowClient(self.uri)
        self.run_id = self.client.create_run("0", run_name="the-job").info.run_id

    def __call__(self, case: str, attempt: int = 0, nodes: int = 2, **switches: str) -> Job:
        context = {"vm_priority": "low-priority", "run_attempt_count": attempt}
        run = {"AZUREML_RUN_ID": self.run_id, "MLFLOW_RUN_ID": self.run_id, "MLFLOW_TRACKING_URI": self.uri}
        extra = run | {"AZUREML_CR_COMPUTE_CONTEXT": json.dumps(context)} | switches
        return self._run_job("stock_tracking.py", case, nodes=nodes, extra=extra)

    def steps(self, metric: str = "train/loss") -> list[int]:
        """The steps at which the job's run has it, which must be the store's only run, and run on."""
        (run,) = self.client.search_runs([each.experiment_id for each in self.client.search_experiments()])
        assert (run.info.run_id, run.info.status, run.info.run_name) == (self.run_id, "RUNNING", "the-job")
        return [each.step for each in self.client.get_metric_history(self.run_id, metric)]


@pytest.fixture
def tracked(run_job: RunJob, _empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracked:
    (tmp_path / "mlflow.db").write_bytes(_empty_store.read_bytes())
    monkeypatch.chdir(tmp_path)  # for Lightning's own files
    return Tracked(run_job, tmp_path)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    servers: list[Server] = []

    def start(store: str) -> str:
        servers.append(Server(tmp_path, store))
        servers[0].start()
        return servers[0].uri

    yield start
    for server in servers:
        server.stop()


@pytest.mark.parametrize("case", ["readme", "stock", pytest.param("csv", marks=pytest.mark.exhaustive)])
def test_any_script_is_recorded_beside_what_it_logs_to(tracked: Tracked, case: str) -> None:
    job = tracked(case)
    assert job.exit_code == 0, job.output
    # Lightning's default logger, which is TensorBoard's where that is installed.
    assert job.each("loggers") in ([[name, "_AddedLogger"]] * 2 for name in ("CSVLogger", "TensorBoardLogger"))
    assert tracked.steps() == list(range(STEPS))
    assert tracked.steps("throughput/samples_per_second") == [9]
    assert tracked.client.get_run(tracked.run_id).data.metrics["summary/nodes"] == 2
    assert job.output.count("| samples/s") == 1


@pytest.mark.exhaustive
def test_over_http(tracked: Tracked, serve: Callable[[str], str]) -> None:
    tracked.uri = serve(tracked.uri)
    job = tracked("readme")
    assert job.exit_code == 0, job.output
    assert tracked.steps() == list(range(STEPS))
    assert len(tracked.steps(SUMMARY)) == 1


def test_lightnings_logger_opens_no_second_run(tracked: Tracked) -> None:
    job = tracked("mlflow")
    assert job.exit_code == 0, job.output
    assert job.each("run_id") == [tracked.run_id] * 2
    assert tracked.steps("own-train/loss") == list(range(STEPS))


@pytest.mark.exhaustive
def test_processes_that_lightning_spawns(tracked: Tracked) -> None:
    job = tracked("spawn", nodes=1)
    assert job.exit_code == 0, job.output
    assert tracked.steps() == list(range(STEPS))
    assert len(tracked.steps(SUMMARY)) == 1


@pytest.mark.parametrize("case", ["none", pytest.param("off", marks=pytest.mark.exhaustive)])
def test_who_says_no_is_not_recorded(tracked: Tracked, case: str) -> None:
    job = tracked(case, **({TRACKING_SWITCH: "off"} if case == "off" else {}))
    assert job.exit_code == 0, job.output
    assert job.each("loggers") == [[] if case == "none" else ["CSVLogger"]] * 2
    assert tracked.steps() == tracked.steps(SUMMARY) == []


@pytest.mark.exhaustive
def test_throughput_has_a_switch_of_its_own(tracked: Tracked) -> None:
    job = tracked("readme", **{THROUGHPUT_SWITCH: "off"})
    assert job.exit_code == 0, job.output
    assert tracked.steps() == list(range(STEPS))
    assert tracked.steps(SUMMARY) == []


@pytest.mark.parametrize("case", [pytest.param("fault", marks=pytest.mark.exhaustive), "late"])
def test_a_fault_of_ours_leaves_the_training_alone(tracked: Tracked, case: str) -> None:
    job = tracked(case)
    assert job.exit_code == 0, job.output
    assert job.each("steps") == [STEPS] * 2
    assert job.output.count("RuntimeError: a fault of ours") == 1
    assert f"{TRACKING_SWITCH}=off" in job.output
    assert tracked.steps() == []


def test_a_restarted_job_leaves_no_point_twice(tracked: Tracked) -> None:
    assert tracked("dies").exit_code != 0
    assert tracked.steps() == [0, 1]
    job = tracked("dies", attempt=1)
    assert job.exit_code == 0, job.output
    assert tracked.steps() == list(range(STEPS))
