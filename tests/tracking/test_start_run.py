"""A script that chooses an experiment before it starts a run, as most scripts of MLflow do, in a job."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from mlflow import MlflowClient

SCRIPT = """
import sys
if sys.argv[1] == "mlflow first":
    import mlflow
import azureml_strategy
import mlflow
mlflow.set_experiment("mine")
for _ in range(2):
    with mlflow.start_run() as run:
        print(run.info.run_id)
"""


@pytest.mark.parametrize("order", ["mlflow first", "mlflow last"])
def test_the_run_of_the_job_is_joined_and_the_next_one_is_the_scripts_own(
    order: str, client: MlflowClient, store: str
) -> None:
    job = client.create_run(client.create_experiment("the job's")).info.run_id
    environ = {**os.environ, "AZUREML_RUN_ID": job, "MLFLOW_RUN_ID": job, "MLFLOW_TRACKING_URI": store}
    command = [sys.executable, "-c", SCRIPT, order]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    assert first == job
    own = client.get_experiment(client.get_run(second).info.experiment_id)
    assert own.name == "mine"
    assert f"has chosen experiment {own.experiment_id}" in done.stderr
