"""The network of a job under azureml_ddp: planned, recorded with the run, and insisted on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from tests.multiprocess.conftest import RunJob


@pytest.fixture
def job_run(tmp_path: Path) -> dict[str, str]:
    """A run in a store of the test's own, and the variables that name it to a job."""
    uri = f"sqlite:///{tmp_path}/job.db"
    client = MlflowClient(uri)
    run = client.create_run(client.create_experiment("network", artifact_location=str(tmp_path / "artifacts")))
    return {"MLFLOW_TRACKING_URI": uri, "MLFLOW_RUN_ID": run.info.run_id}


def test_the_network_is_recorded_with_the_run(run_job: RunJob, job_run: dict[str, str], tmp_path: Path) -> None:
    context = json.dumps({"vm_size": "Standard_NC96ads_A100_v4"})
    job = run_job("network.py", "{}", nodes=2, extra={**job_run, "AZUREML_CR_COMPUTE_CONTEXT": context})
    assert job.exit_code == 0, job.output
    # The second Trainer of the process uses the first one's process group.
    assert job.results[0]["lines"] == ["Network: gloo over sockets on lo"] * 2
    assert job.results[1]["lines"] == [None, None]
    assert job.output.count("Network: gloo over sockets on lo") == 1
    run = MlflowClient(job_run["MLFLOW_TRACKING_URI"]).get_run(job_run["MLFLOW_RUN_ID"])
    tags = {name: value for name, value in run.data.tags.items() if name.startswith("network.")}
    assert tags == {
        "network.backend": "gloo",
        "network.transport": "gloo",
        "network.vm_size": "Standard_NC96ads_A100_v4",
    }
    recorded = json.loads((tmp_path / "artifacts" / job_run["MLFLOW_RUN_ID"] / "artifacts/network.json").read_text())
    assert [node["node_rank"] for node in recorded["nodes"]] == [0, 1]
    assert [setting["variable"] for setting in recorded["nodes"][1]["kept"]] == ["GLOO_SOCKET_IFNAME"]


def test_required_infiniband_that_is_not_there_stops_every_rank_before_the_start(
    run_job: RunJob, job_run: dict[str, str]
) -> None:
    job = run_job("network.py", "{'require_infiniband': True}", nodes=2, extra=job_run)
    assert job.exit_code == 0, job.output
    errors = job.each("error")
    assert errors[0] == errors[1]
    assert errors[0].startswith("ranks 0, 1 on ")
    assert "require_infiniband=True, but the backend is gloo, which uses sockets." in errors[0]


def test_a_rank_that_never_comes_is_named_instead_of_a_time_out(run_job: RunJob) -> None:
    job = run_job("network.py", "{'timeout_s': 5, 'absent': 1}", nodes=2)
    assert job.exit_code == 0, job.output
    assert "1 of 2 processes came to the rendezvous at 127.0.2.1:" in job.results[0]["error"]
    assert "within 0:00:05. Missing: rank 1 (node 1)" in job.results[0]["error"]
