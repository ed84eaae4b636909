"""The plain Lightning script: two emulated nodes train as one process on the joined batch does, and record it."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient
from tests.emulator.conftest import _empty_store, store
from tests.preloaded import run_forked, start_forked

from azureml_strategy.cluster.emulated import without_job_variables
from azureml_strategy.emulator import EmulatedJob, emulate

__all__ = ["_empty_store", "store"]  # fixtures
SCRIPT = str(Path(__file__).parents[2] / "examples/lightning/train.py")
ARGUMENTS = ["--lr", "0.2", "--epochs", "2"]


def alone(folder: Path) -> list[float]:
    """The losses of one process outside of a job, which Lightning writes into a file."""
    command = [SCRIPT, *ARGUMENTS, "--batch-size", "32"]
    done = run_forked(command, without_job_variables(os.environ), timeout=100)
    assert done.returncode == 0, done.stdout
    with (folder / "lightning_logs/version_0/metrics.csv").open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def test_two_nodes_record_the_losses_of_one_process(
    store: MlflowClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    expected = alone(tmp_path)
    monkeypatch.setattr("azureml_strategy.emulator.processes._start", start_forked)
    job = EmulatedJob([sys.executable, SCRIPT, *ARGUMENTS, "--batch-size", "16"], nodes=2)
    assert emulate(job) == 0, capsys.readouterr().out
    (run,) = store.search_runs([each.experiment_id for each in store.search_experiments()])
    history = sorted(store.get_metric_history(run.info.run_id, "train/loss"), key=lambda each: each.step)
    assert [each.value for each in history] == pytest.approx(expected, abs=1e-6)
    assert len(history) == 32
    assert run.data.metrics["val/accuracy"] > 0.9
    assert run.data.metrics["summary/nodes"] == 2
    assert run.data.params == {"lr": "0.2"}
