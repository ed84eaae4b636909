"""A study of submitted jobs, against the loopback Azure and a store with the runs they would have left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from tests.jobs.azure_service.exchange import Reply, Request
from tests.jobs.azure_service.service import AzureService
from tests.study.conftest import MakeRun, rename_run

from azureml_strategy.cli import main

RECIPE = ["resnet50_synthetic", "cluster=nd96isr_h100_v5", "cluster.price_per_hour=36"]


@pytest.fixture
def tracked(azure_service: AzureService, store: MlflowClient, make_run: MakeRun, tmp_path: Path) -> AzureService:
    """Each job that is created leaves a run: 1,000 images a second on one node, and 90 % of perfect scaling."""
    azure_service.workspace.properties["mlFlowTrackingUri"] = store.tracking_uri
    azure_service.jobs.states = ("Completed",)  # nobody waits
    made: set[str] = set()

    def manage(request: Request) -> Reply:
        reply = azure_service.manage(request)
        name = request.path.rpartition("/jobs/")[2]
        if request.method == "PUT" and name in azure_service.jobs and name not in made:
            made.add(name)
            nodes = request.json["properties"]["resources"]["instanceCount"]
            rename_run(tmp_path / "mlflow.db", make_run(nodes, 1000.0 * nodes * (0.9 if nodes > 1 else 1)), name)
        return reply

    azure_service.hosts["management.azure.com"] = manage
    return azure_service


def test_all_sizes_are_submitted_then_waited_for(tracked: AzureService, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", *RECIPE, "--nodes", "1,4", "--steps", "60", "--price-per-hour", "36"]) == 0
    output = capsys.readouterr().out
    bodies = [tracked.jobs[name].body["properties"] for name in tracked.jobs]
    assert [body["resources"]["instanceCount"] for body in bodies] == [1, 4]
    for body in bodies:
        assert "trainer.max_steps=60" in body["command"]
        assert "trainer.limit_val_batches=0" in body["command"]
        assert body["environmentVariables"]["AZUREML_STRATEGY_PRICE_PER_HOUR"] == "36.0"
    for name in tracked.jobs:
        assert f"job {name}, https://ml.azure.com/runs/{name}" in output
        assert f"{name}: Completed" in output
    assert f"azureml-strategy study --runs {','.join(tracked.jobs)} --store azureml" in output
    runs = json.loads(Path("outputs/study.json").read_text())["runs"]
    assert [(run["nodes"], run["efficiency"]) for run in runs] == [(1, 1.0), (4, pytest.approx(0.9))]
    assert main(["study", "--runs", ",".join(tracked.jobs), "--store", "azureml"]) == 0
    assert "90.0%" in capsys.readouterr().out


def test_nothing_is_submitted_unless_all_sizes_can_be(
    tracked: AzureService, capsys: pytest.CaptureFixture[str]
) -> None:
    ethernet = ["resnet50_synthetic", "cluster=nc24ads_a100_v4", "--nodes", "1,2"]
    assert main(["study", *ethernet]) == 2
    assert "cluster.allow_ethernet=true" in capsys.readouterr().err
    assert main(["study", *RECIPE, "--nodes", "1,2", "cluster.num_nodes=2"]) == 2
    assert "--nodes names them all" in capsys.readouterr().err
    assert len(tracked.jobs) == 0
