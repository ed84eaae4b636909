"""What goes into the job's MLflow run, and what happens where there is none."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from mlflow import MlflowClient
from tests.bench.conftest import MakePairs

from azureml_strategy.bench.results import Results, log_results


@pytest.fixture
def run_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A job's own run, open."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run = MlflowClient(uri).create_run("0", run_name="the job")
    monkeypatch.setenv("MLFLOW_RUN_ID", run.info.run_id)
    return str(run.info.run_id)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "bench.json", tmp_path / "bench.png"]
    for path in paths:
        path.write_bytes(b"content")
    return paths


def test_a_sweep(sweep: Results, run_id: str, files: list[Path]) -> None:
    log_results(sweep, files)
    client = MlflowClient()
    history = client.get_metric_history(run_id, "bench/all-reduce/bus_bandwidth_GBps")
    assert sorted((metric.step, metric.value) for metric in history) == [(1 << 20, 0.1), (64_000_000, 0.12)]
    run = client.get_run(run_id)
    assert run.data.metrics["bench/broadcast/wrong_elements"] == 3
    assert run.data.metrics["bench/broadcast/median_s"] == pytest.approx(64e6 / 0.11e9)
    assert run.data.tags["bench.verdict"] == "as expected"
    assert {item.path for item in client.list_artifacts(run_id, "bench")} == {"bench/bench.json", "bench/bench.png"}
    assert (run.info.status, run.info.run_name) == ("RUNNING", "the job"), "neither closed nor renamed"


def test_pairs(pairs: MakePairs, run_id: str) -> None:
    log_results(pairs({(0, 1): 2.0, (0, 2): 1.0, (1, 2): 2.0}), [])
    (metric,) = MlflowClient().get_metric_history(run_id, "bench/pairs/0-2/bus_bandwidth_GBps")
    assert (metric.step, metric.value) == (1 << 24, 1.0)


def test_without_a_run_nothing_is_logged(sweep: Results, files: list[Path], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log_results(sweep, files)
    assert not (tmp_path / "mlflow.db").exists()
    assert not (tmp_path / "mlruns").exists()


def test_a_store_that_is_away_costs_a_warning(
    sweep: Results, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_RUN_ID", "job-1")
    with pytest.warns(UserWarning, match="not all logged into run job-1") as caught:
        log_results(sweep, files)
    assert not any("secret" in str(each.message) for each in caught)
