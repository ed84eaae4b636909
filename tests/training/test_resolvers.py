from __future__ import annotations

import re

import pytest
from omegaconf import OmegaConf
from tests.emulated import only_documented

from azureml_strategy.cluster.emulated import EmulatedRun, azure_variables
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.training.resolvers import register_resolvers


def resolved(expression: str) -> object:
    register_resolvers()
    return OmegaConf.create({"value": f"${{azureml.{expression}}}"}).value


def test_a_run_is_named_after_the_job_or_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", str(resolved("run:")))
    monkeypatch.setenv("AZUREML_RUN_ID", "quirky_plum")
    assert resolved("run:") == "quirky_plum"


def test_the_name_stays_while_the_clock_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    register_resolvers()
    config = OmegaConf.create({"value": "${azureml.run:}"})
    first = config.value
    monkeypatch.setenv("AZUREML_RUN_ID", "later")
    assert config.value == first


@pytest.mark.parametrize("distribution", ["pytorch", "mpi", "tensorflow"])
@pytest.mark.parametrize(("rank", "folder"), [(0, ".hydra"), (1, None), (2, None)])
def test_only_global_rank_0_records_the_configuration(
    monkeypatch: pytest.MonkeyPatch, distribution: str, rank: int, folder: str | None
) -> None:
    launch = Launch(distribution, rank, 4, rank % 2, 2, rank // 2, 2, "10.0.0.4", 6105)
    run = EmulatedRun("quirky_plum", "tests", "1", "sqlite:///mlflow.db")
    for name, value in azure_variables(launch, distribution, ["10.0.0.4", "10.0.0.5"], run).items():
        monkeypatch.setenv(name, value)
    assert resolved("hydra_subdir:") == folder


@pytest.mark.parametrize(("rank", "folder"), [(0, ".hydra"), (1, None)])
def test_the_rank_is_known_where_the_number_of_nodes_is_not(
    monkeypatch: pytest.MonkeyPatch, rank: int, folder: str | None
) -> None:
    launch = Launch("pytorch", rank, 2, 0, 1, rank, 2, "10.0.0.4", 6105)
    run = EmulatedRun("quirky_plum", "tests", "1", "sqlite:///mlflow.db")
    variables = azure_variables(launch, "pytorch", ["10.0.0.4", "10.0.0.5"], run)
    for name, value in only_documented(variables).items():
        monkeypatch.setenv(name, value)
    assert resolved("hydra_subdir:") == folder


@pytest.mark.parametrize(("variables", "devices"), [({}, 2), ({"AZUREML_RUN_ID": "quirky_plum"}, 2)])
def test_processes_that_nobody_has_started(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], devices: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert resolved("devices:2") == devices


def test_a_job_s_processes_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """`trainer=cpu` made two of each process of a job."""
    launch = Launch("pytorch", 1, 2, 0, 1, 1, 2, "10.0.0.4", 6105)
    run = EmulatedRun("quirky_plum", "tests", "1", "sqlite:///mlflow.db")
    for name, value in azure_variables(launch, "pytorch", ["10.0.0.4", "10.0.0.5"], run).items():
        monkeypatch.setenv(name, value)
    assert resolved("devices:2") == "auto"


def test_outside_a_job_the_configuration_is_recorded() -> None:
    assert resolved("hydra_subdir:") == ".hydra"


def test_values_by_device() -> None:
    assert resolved("by_device:32,224") == 32
    assert resolved("by_device:0,null") == 0


def test_precision_is_one_of_lightnings() -> None:
    assert resolved("precision:") in ("bf16-mixed", "16-mixed", "32-true")
