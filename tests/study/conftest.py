"""A store with runs made by hand, and the loopback Azure."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from tests.jobs.azure_service.fixture import azure_certificate, azure_service

__all__ = ["azure_certificate", "azure_service"]


@pytest.fixture(scope="session")
def _empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "empty.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()  # MLflow makes the tables, which takes seconds
    return path


@pytest.fixture
def store(_empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """The store that a study uses."""
    shutil.copy(_empty_store, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return MlflowClient(uri)


MakeRun = Callable[..., str]


@pytest.fixture
def make_run(store: MlflowClient) -> MakeRun:
    """A run as a training of so many nodes leaves it, with a rate or without."""

    def make(
        nodes: int, rate: float | None, *, status: str = "FINISHED", params: dict[str, str] | None = None, **tags: str
    ) -> str:
        run_id: str = store.create_run("0", run_name=f"on-{nodes}").info.run_id
        if rate is not None:
            metrics = {"samples_per_second": rate, "samples_per_second_per_device": rate / (2 * nodes)}
            for name, value in {**metrics, "nodes": nodes, "devices": 2 * nodes}.items():
                store.log_metric(run_id, f"summary/{name}", value)
        for name, text in {"throughput_unit": "images", "network_transport": "ib", **tags}.items():
            store.set_tag(run_id, name.replace("_", "."), text)
        for name, text in (params or {}).items():
            store.log_param(run_id, name, text)
        store.set_terminated(run_id, status)
        return run_id

    return make


def rename_run(database: Path, run_id: str, name: str) -> None:
    """Azure ML's runs have the names of their jobs for ids, which no other store lets one choose."""
    with sqlite3.connect(database) as connection:
        for table in ("runs", "metrics", "latest_metrics", "tags", "params"):
            connection.execute(f"UPDATE {table} SET run_uuid = ? WHERE run_uuid = ?", (name, run_id))
    connection.close()
