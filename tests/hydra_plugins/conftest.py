"""The loopback Azure, with the metrics that its jobs have logged, and Hydra's applications in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from tests.jobs.azure_service import history
from tests.jobs.azure_service.exchange import Reply, Request
from tests.jobs.azure_service.fixture import azure_certificate, azure_service
from tests.jobs.azure_service.service import REGION, AzureService

from azureml_strategy.training.app import run_recipe

__all__ = ["azure_certificate", "azure_service"]

# One small node whose price is known, and an image, because our own environment would be packed up first.
JOB = ["cluster=nc4as_t4_v3", "cluster.price_per_hour=1", "job.environment.image=ours"]
LAUNCHER = ["hydra/launcher=azureml", "hydra.launcher.poll_interval_s=0.01"]
Sweep = Callable[..., None]


@pytest.fixture
def metrics(azure_service: AzureService) -> dict[str, float]:
    """What every job has logged; the real azureml-mlflow asks the service for it."""
    logged: dict[str, float] = {}

    def answer(request: Request) -> Reply:
        if not request.path.endswith("/mlflow/runs/get"):
            return history.answer(request, azure_service.workspace, azure_service.blobs)
        values = [{"key": key, "value": value, "timestamp": 1, "step": 1} for key, value in logged.items()]
        info = {"run_id": request.query["run_id"], "experiment_id": "0", "status": "FINISHED", "start_time": 1}
        return Reply({"run": {"info": info, "data": {"metrics": values}}})

    azure_service.hosts[f"{REGION}.api.azureml.ms"] = answer
    return logged


@pytest.fixture
def sweep(azure_service: AzureService, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """`azureml-strategy train RECIPE -m hydra/launcher=azureml ...`, in this process."""
    monkeypatch.setattr(sys, "argv", ["azureml-strategy"])

    def run(*overrides: str) -> None:
        run_recipe("resnet50_synthetic", ["-m", *LAUNCHER, *JOB, *overrides])

    return run
