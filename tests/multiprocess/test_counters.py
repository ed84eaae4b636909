"""The counters of all nodes of an emulated job, in its MLflow run."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from mlflow import MlflowClient
from tests.emulator.conftest import _empty_store
from tests.multiprocess.conftest import RunJob

__all__ = ["_empty_store"]  # a fixture


def test_both_nodes_are_in_the_run_and_one_is_warned_of(
    run_job: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = MlflowClient(uri)
    experiment = client.create_experiment("counters", artifact_location=(tmp_path / "files").as_uri())
    run_id = client.create_run(experiment).info.run_id
    job = run_job(
        "counted.py", nodes=2, processes_per_node=2, extra={"MLFLOW_RUN_ID": run_id, "MLFLOW_TRACKING_URI": uri}
    )
    assert job.exit_code == 0, job.output
    assert job.each("threads") == [[]] * 4

    metrics = client.get_run(run_id).data.metrics
    for node in ("node_0", "node_1"):
        points = client.get_metric_history(run_id, f"system/{node}/cpu_utilization_percentage")
        assert {2, 5} <= {each.step for each in points}
        assert all(0 <= each.value <= 100 for each in points)
    assert metrics["system/node_0/infiniband_link_downs"] == 0
    assert metrics["system/node_1/infiniband_link_downs"] == 2
    assert "system/cpu_utilization_percentage" not in metrics

    warning = f"Node {socket.gethostname()} (node_1): the InfiniBand port mlx5_ib0:1 counted 2 link_downed"
    assert job.output.count(warning) == 1
    events = Path(client.download_artifacts(run_id, "events/attempt_0.jsonl", str(tmp_path))).read_text()
    (event,) = [json.loads(line) for line in events.splitlines()]
    assert event["text"].startswith(warning)
