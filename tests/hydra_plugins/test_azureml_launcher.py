"""Sweeps as jobs, against the loopback Azure."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_module
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from tests.hydra_plugins.conftest import JOB, LAUNCHER, Sweep
from tests.jobs.azure_service.service import AzureService

from azureml_strategy.cluster.emulated import EmulatedRun, azure_variables
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.training.app import run_recipe
from azureml_strategy.training.resolvers import register_resolvers


def commands(service: AzureService) -> list[str]:
    """What the jobs run, in the order in which they were submitted."""
    return [service.jobs[name].body["properties"]["command"] for name in service.jobs]


def test_a_job_for_each_combination(
    sweep: Sweep, azure_service: AzureService, metrics: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    metrics |= {"val/top1": 0.75, "throughput/samples_per_second": 100.0}
    sweep("model.learning_rate=0.1,0.2", "seed=7", "hydra.job.chdir=true")
    rates = [
        f"azureml-strategy train resnet50_synthetic {' '.join(JOB)} model.learning_rate={rate} seed=7 "
        "hydra.job.chdir=true output_dir=${{outputs.run}}"
        for rate in (0.1, 0.2)
    ]
    assert commands(azure_service) == rates
    assert [re.sub("-.{8}-", "-X-", name) for name in azure_service.jobs] == ["sweep-X-0", "sweep-X-1"]
    for name in azure_service.jobs:
        assert azure_service.jobs[name].body["properties"]["resources"]["instanceCount"] == 1
    printed = capsys.readouterr().out
    assert len(re.findall(r"#[01] sweep-\S+ \(.*\): https://ml\.azure\.com/runs/sweep", printed)) == 2
    assert len(re.findall(r"#[01] sweep-.*: Completed val/top1 0\.75$", printed, re.M)) == 2


def test_one_that_fails_fails_the_sweep_after_the_others(
    sweep: Sweep, azure_service: AzureService, metrics: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    azure_service.jobs.states = ("Queued", "Failed")
    with pytest.raises(SystemExit):
        sweep("seed=1,2")
    printed = capsys.readouterr()
    assert printed.out.count(": Failed") == 2
    assert re.search(r"#0 sweep-\S+ \(.*seed=1\) ended as Failed\. Type `azureml-strategy jobs logs", printed.err)
    assert "Traceback" not in printed.err


def test_no_waiting_and_a_folder_that_jobs_share_with_a_place_for_each(
    sweep: Sweep, azure_service: AzureService
) -> None:
    path = r"job.outputs.run.path='azureml://datastores/a/paths/\${{name}}'"
    sweep("seed=1,2", path, "hydra.launcher.wait=false")
    assert len(azure_service.jobs) == 2
    assert not azure_service.asked("GET", r"/jobs/sweep")


def test_one_at_a_time(sweep: Sweep, azure_service: AzureService, metrics: dict[str, float]) -> None:
    sweep("seed=1,2", "hydra.launcher.max_concurrent=1")
    first, second = azure_service.jobs
    asked = [str(request) for request in azure_service.requests]
    started = next(place for place, each in enumerate(asked) if each.startswith("PUT") and each.endswith(second))
    assert azure_service.jobs[first].states == ["Completed"]
    assert sum(each.startswith("GET") and each.endswith(first) for each in asked[:started]) >= 3


def test_one_that_cannot_be_submitted_keeps_no_other_from_it(
    sweep: Sweep, azure_service: AzureService, metrics: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    azure_service.fail("PUT", r"/jobs/sweep-\w+-1$", 409, "Conflict", "Not this one.")
    with pytest.raises(SystemExit):
        sweep("seed=1,2,3")
    assert [command.rpartition("seed=")[2][0] for command in commands(azure_service)] == ["1", "3"]
    printed = capsys.readouterr()
    assert printed.out.count(": Completed") == 2
    assert "Conflict" in printed.err


def test_if_the_first_cannot_be_submitted_none_is(
    sweep: Sweep, azure_service: AzureService, capsys: pytest.CaptureFixture[str]
) -> None:
    azure_service.fail("PUT", r"/jobs/", 403, "AuthorizationFailed", "No permission.", times=9)
    with pytest.raises(SystemExit):
        sweep("seed=1,2")
    assert len(azure_service.asked("PUT", r"/jobs/")) == 1
    printed = capsys.readouterr()
    assert "AuthorizationFailed" in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster.num_nodes=1,2"], "InfiniBand"),
        (
            ["seed=1,2", "hydra.launcher.wait=false", "hydra.launcher.max_concurrent=1"],
            "needs wait=true",
        ),
        (["seed=1,2", "job.outputs.run.path=azureml://datastores/a/paths/b"], r"Jobs #0 and #1 would both write into"),
    ],
)
def test_what_is_wrong_is_said_before_the_first_job(
    overrides: list[str], words: str, sweep: Sweep, azure_service: AzureService, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sweep(*overrides)
    printed = capsys.readouterr()
    assert words in printed.err
    assert "Traceback" not in printed.err
    assert not azure_service.requests


def test_without_the_extra_azure(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "azure.ai.ml", None)
    with pytest.raises(SystemExit):
        sweep("seed=1,2")
    printed = capsys.readouterr().err
    assert "pip install -c constraints.txt '.[azure]'" in printed
    assert "Traceback" not in printed


def test_refused_inside_a_job(
    sweep: Sweep, azure_service: AzureService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = Launch("pytorch", 0, 1, 0, 1, 0, 1, "10.0.0.4", 6105)
    run = EmulatedRun("quirky_plum", "tests", "1", "sqlite:///mlflow.db")
    for name, value in azure_variables(process, "pytorch", ["10.0.0.4"], run).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        sweep("seed=1,2")
    assert "each process would submit the whole sweep" in capsys.readouterr().err
    assert not azure_service.requests


def test_a_sweep_in_a_file(sweep: Sweep, azure_service: AzureService, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        """
        defaults:
          - resnet50_synthetic
          - override cluster: nc8as_t4_v3
          - override hydra/launcher: azureml
          - _self_
        cluster: {price_per_hour: 1}
        job: {environment: {image: ours}}
        hydra:
          launcher: {wait: false}
          sweeper: {params: {seed: '1,2'}}
        """
    )
    run_recipe("mine.yaml", ["-m"])
    assert commands(azure_service) == [
        f"azureml-strategy train ./mine.yaml seed={seed} output_dir=${{{{outputs.run}}}}" for seed in (1, 2)
    ]


@pytest.fixture
def launch() -> Any:
    """What the jobs of a sweep return to a sweeper."""
    register_resolvers()

    def of(combinations: Sequence[Sequence[str]], *settings: str, task: Any = run_recipe) -> Sequence[JobReturn]:
        with initialize_config_module("azureml_strategy.recipes", version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            overrides = [*LAUNCHER, *settings]
            config = loader.load_configuration("resnet50_synthetic", overrides, RunMode.MULTIRUN)
            context = HydraContext(config_loader=loader, callbacks=Callbacks())
            launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
            return launcher.launch([[*JOB, *each] for each in combinations], 5)

    return of


def test_what_a_job_returns(launch: Any, azure_service: AzureService, metrics: dict[str, float]) -> None:
    metrics["val/top1"] = 0.75
    (returned,) = launch([["seed=3"]])
    (name,) = azure_service.jobs
    assert name.endswith("-5")
    assert returned.status is JobStatus.COMPLETED
    assert returned.return_value == {
        "name": name,
        "studio_url": returned.return_value["studio_url"],
        "status": "Completed",
        "metrics": {"val/top1": 0.75},
    }
    assert returned.overrides[-1] == "seed=3"
    assert returned.cfg.seed == 3
    assert returned.hydra_cfg.hydra.job.num == 5


def test_a_number_for_a_sweeper_that_searches(
    launch: Any, azure_service: AzureService, metrics: dict[str, float]
) -> None:
    metrics["val/top1"] = 0.75
    returned = launch([["seed=3"], ["seed=4"]], "hydra.launcher.metric=val/top1")
    assert [each.return_value for each in returned] == [0.75, 0.75]
    (wrong,) = launch([["seed=3"]], "hydra.launcher.metric=val/top2")
    assert wrong.status is JobStatus.FAILED
    with pytest.raises(HydraException, match=r"logged no metric 'val/top2'. Did you mean 'val/top1'"):
        _ = wrong.return_value


def test_an_application_of_the_users_is_refused(launch: Any, azure_service: AzureService) -> None:
    with pytest.raises(HydraException, match="an application of your own"):
        launch([["seed=3"]], task=pytest.fixture)
    assert not azure_service.requests
