"""The plain Lightning script: two emulated nodes train as one process on the joined batch does, and record it."""

from __future__ import annotations

import csv
import json
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient
from mlflow.entities import Run
from tests.emulator.conftest import _empty_store, store
from tests.preloaded import run_forked, start_forked

from azureml_strategy.cli import main
from azureml_strategy.cluster.emulated import without_job_variables
from azureml_strategy.emulator import EmulatedJob, emulate

__all__ = ["_empty_store", "store"]  # fixtures
SCRIPT = str(Path(__file__).parents[2] / "examples/lightning/train.py")
ARGUMENTS = ["--lr", "0.2", "--epochs", "2"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process outside of a job, which Lightning writes into a file: of TensorBoard, if installed."""
    folder = tmp_path_factory.mktemp("alone")
    command = [SCRIPT, *ARGUMENTS, "--batch-size", "32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = run_forked(command, without_job_variables(os.environ), timeout=100)
    assert done.returncode == 0, done.stdout
    logs = folder / "lightning_logs/version_0"
    if find_spec("tensorboard"):
        events = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(str(logs))
        return [each.value for each in events.Reload().Scalars("train/loss")]
    with (logs / "metrics.csv").open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def recorded(store: MlflowClient) -> tuple[Run, list[float]]:
    """The job's only run, and its losses."""
    (run,) = store.search_runs([each.experiment_id for each in store.search_experiments()])
    history = sorted(store.get_metric_history(run.info.run_id, "train/loss"), key=lambda each: each.step)
    return run, [each.value for each in history]


def test_two_nodes_record_the_losses_of_one_process(
    alone: list[float],
    store: MlflowClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("azureml_strategy.emulator.processes._start", start_forked)
    job = EmulatedJob([sys.executable, SCRIPT, *ARGUMENTS, "--batch-size", "16"], nodes=2)
    assert emulate(job) == 0, capsys.readouterr().out
    run, losses = recorded(store)
    assert losses == pytest.approx(alone, abs=1e-6)
    assert len(losses) == 32
    assert run.data.metrics["val/accuracy"] > 0.9
    assert run.data.metrics["summary/nodes"] == 2
    assert run.data.params == {"lr": "0.2"}


def test_the_command_that_submit_renders_trains_to_the_same_losses(
    alone: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A real shell runs it in the folder of code, on an emulated node; on two the script itself is tried above."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "it's mine/.git").mkdir(parents=True)
    (tmp_path / "it's mine/my code").mkdir()
    (tmp_path / "it's mine/my code/train $1.py").write_text(Path(SCRIPT).read_text())
    monkeypatch.chdir(tmp_path / "it's mine/my code")
    size = ("cluster=nc24ads_a100_v4", "cluster.num_nodes=1")
    arguments = ("--", *ARGUMENTS, "--batch-size", "32")
    assert main(["submit", "--dry-run", "train $1.py", *size, "+job.tags.mine=yes", *arguments]) == 0
    job = yaml.safe_load(capfd.readouterr().out)
    monkeypatch.chdir(job["code"])
    assert emulate(EmulatedJob(["bash", "-c", job["command"]], nodes=1)) == 0, capfd.readouterr().out
    _, losses = recorded(MlflowClient(f"sqlite:///{job['code']}/mlflow.db"))
    assert losses == pytest.approx(alone, abs=1e-6)
    assert len(losses) == 32


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_study_of_the_script(
    store: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("azureml_strategy.emulator.processes._start", start_forked)
    command = ["--", sys.executable, SCRIPT, "--epochs", "6", "--batch-size", "16"]
    assert main(["study", "--nodes", "1,2", "--local", *command]) == 0, capsys.readouterr().out
    runs = json.loads(Path("outputs/study.json").read_text())["runs"]
    assert [(run["nodes"], run["devices"], run["problem"]) for run in runs] == [(1, 1, ""), (2, 2, "")]
    assert all(run["samples_per_second"] > 0 for run in runs)
