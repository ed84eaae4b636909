"""A second attempt of a job repeats steps: the run has each of them once."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from azureml_strategy.tracking import JobMLFlowLogger


@pytest.fixture
def run_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    client = MlflowClient()
    return str(client.create_run(client.create_experiment("tests")).info.run_id)


def _attempt(run_id: str, steps: range, continues: bool) -> None:
    logger = JobMLFlowLogger(run_id=run_id)
    if continues:
        logger.continue_run()
    for step in steps:
        logger.log_metrics({"loss": 1.0 / (step + 1)} | ({"accuracy": 0.5} if step % 4 == 0 else {}), step)
    logger.finalize()


def _steps(run_id: str, name: str) -> list[int]:
    return [metric.step for metric in MlflowClient().get_metric_history(run_id, name)]


def test_repeated_steps_are_left_out(run_id: str) -> None:
    _attempt(run_id, range(10), continues=False)
    _attempt(run_id, range(6, 15), continues=True)
    assert _steps(run_id, "loss") == list(range(15))
    assert _steps(run_id, "accuracy") == [0, 4, 8, 12]


def test_what_an_attempt_did_not_get_to_write_is_written(run_id: str) -> None:
    _attempt(run_id, range(3), continues=True)
    _attempt(run_id, range(2, 6), continues=True)
    assert _steps(run_id, "loss") == list(range(6))


def test_a_run_that_starts_anew_logs_all(run_id: str) -> None:
    _attempt(run_id, range(3), continues=False)
    _attempt(run_id, range(3), continues=False)
    assert sorted(_steps(run_id, "loss")) == [0, 0, 1, 1, 2, 2]
