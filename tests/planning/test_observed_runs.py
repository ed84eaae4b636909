"""Runs of a real MLflow store, as our logger writes them: what a calibration takes of them, and which it cannot use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from mlflow import MlflowClient
from tests.tracking.conftest import TinyModel, _empty_store, client, data, make_logger, make_trainer, model, store
from torch.utils.data import DataLoader

from azureml_strategy.planning.observed_runs import observe_runs
from azureml_strategy.reporting.stores import StoredRun, open_store
from azureml_strategy.tracking import JobMLFlowLogger, RunReport, ThroughputCallback

__all__ = ["_empty_store", "client", "data", "make_logger", "make_trainer", "model", "store"]  # fixtures

TAGS = {
    "azureml_strategy.recipe": "resnet50_imagenet",
    "azureml_strategy.overrides": "cluster=nc24ads_a100_v4 data.batch_size=128 output_dir=out model.learning_rate=0.1",
    "azureml_strategy.vm_size": "Standard_NC24ads_A100_v4",
    "azureml_strategy.device": "NVIDIA A100 80GB PCIe",
    "azureml_strategy.compiled": "false",
    "throughput.unit": "images",
}
PARAMS = {"trainer/precision": "bf16-mixed", "data/batch_size": "128"}
METRICS = {
    "summary/samples_per_second": 1500.0,
    "summary/steps": 500.0,
    "summary/nodes": 1.0,
    "summary/devices": 1.0,
}


@pytest.fixture
def log_run(store: str, make_logger: Callable[..., JobMLFlowLogger]) -> Callable[..., StoredRun]:
    """Write a run through our logger, with some tags and metrics of its own, and read it as `plan` does."""

    def log(
        tags: Mapping[str, str] = {}, metrics: Mapping[str, float] = {}, params: Mapping[str, str] = {}
    ) -> StoredRun:
        logger = make_logger(tracking_uri=store, tags={name: each for name, each in (TAGS | tags).items() if each})
        logger.log_hyperparams({name: each for name, each in (PARAMS | params).items() if each})
        logger.log_metrics({name: each for name, each in (METRICS | metrics).items() if each is not None}, step=100)
        logger.finalize("success")
        return open_store(store).run(str(logger.run_id))

    return log


def test_a_run_says_what_predict_must_know(log_run: Callable[..., StoredRun]) -> None:
    (found,), left_out = observe_runs([log_run()])
    assert not left_out
    given = dict(found.arguments)
    assert found.samples_per_second == 1500
    assert given.pop("network").parameters == pytest.approx(25.56e6, rel=1e-3)
    assert given.pop("strategy").strategy == "ddp"
    assert given == {
        "batch_size": 128,
        "gpu": "A100 PCIe 80GB",
        "vm_size": "Standard_NC24ads_A100_v4",
        "nodes": 1,
        "gpus_per_node": 1,
        "precision": "bf16-mixed",
        "compiled": False,
        "optimizer": "sgd",
        "interconnect": None,
    }


def test_a_rate_of_tokens_becomes_one_of_sequences_of_all_gpus(log_run: Callable[..., StoredRun]) -> None:
    tags = {
        "azureml_strategy.recipe": "gpt_ddp",
        "azureml_strategy.overrides": "strategy=model_parallel model=gpt_1b data.batch_size=8",
        "azureml_strategy.vm_size": "Standard_ND96asr_v4",
        "azureml_strategy.device": "NVIDIA A100-SXM4-40GB",
        "azureml_strategy.compiled": "true",
        "throughput.unit": "tokens",
        "network.transport": "socket",
    }
    metrics = {"summary/samples_per_second": 2048 * 100.0, "summary/nodes": 2.0, "summary/devices": 16.0}
    observed, left_out = observe_runs([log_run(tags, metrics, {"data/batch_size": "8"})])
    assert not left_out
    (found,) = observed
    assert found.samples_per_second == 100
    assert found.arguments["network"].tokens == 2048
    assert (found.arguments["nodes"], found.arguments["gpus_per_node"]) == (2, 8)
    assert (found.arguments["interconnect"], found.arguments["compiled"]) == ("ethernet", True)
    assert found.arguments["strategy"].strategy == "model_parallel"


def test_a_recipe_of_ones_own_is_found_by_the_planned_file(log_run: Callable[..., StoredRun], tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("defaults:\n  - resnet50_imagenet\n  - _self_\ndata:\n  image_size: 160\n")
    run = log_run({"azureml_strategy.recipe": "own"})
    (found,), _ = observe_runs([run], str(own))
    of_shipped = observe_runs([log_run()])[0][0].arguments["network"]
    assert found.arguments["network"].flops < 0.6 * of_shipped.flops
    none, (reason,) = observe_runs([run], "resnet50_imagenet")
    assert not none
    assert "There is no recipe 'own'" in reason


@pytest.mark.parametrize(
    ("tags", "metrics", "says"),
    [
        ({"azureml_strategy.device": "cpu"}, {}, "ran on a CPU"),
        ({"azureml_strategy.device": "NVIDIA A100 MIG 1g.10gb"}, {}, "its GPU is not known"),
        ({"azureml_strategy.device": "", "azureml_strategy.vm_size": ""}, {}, "neither its GPU nor its VM size"),
        ({"azureml_strategy.device": "", "azureml_strategy.vm_size": "Standard_D4s_v5"}, {}, "its GPU is not known"),
        ({"azureml_strategy.vm_size": "ba\nnana"}, {}, "is not the name of an Azure VM size"),
        ({"azureml_strategy.emulated": "true"}, {}, "emulated on one machine"),
        ({"azureml_strategy.recipe": ""}, {}, "no run of a recipe"),
        ({"azureml_strategy.recipe": "/etc/passwd"}, {}, "its recipe has the name"),
        ({"azureml_strategy.recipe": "resnet51"}, {}, "There is no recipe 'resnet51'"),
        ({"azureml_strategy.overrides": "model._target_=os.system"}, {}, "os.system, which is not made here"),
        ({"azureml_strategy.overrides": "'open quote"}, {}, "cannot be read"),
        ({"azureml_strategy.overrides": "modle.x=1"}, {}, "modle"),
        ({"throughput.unit": "furlongs"}, {}, "counted furlongs"),
        ({}, {"summary/samples_per_second": None}, "logged no summary/samples_per_second"),
        ({}, {"summary/samples_per_second": math.nan}, "it logged"),
        ({}, {"summary/samples_per_second": -3.0}, "it logged -3"),
        ({}, {"summary/samples_per_second": math.inf}, "it logged"),
        ({}, {"summary/samples_per_second": 1e300}, "expected. So large a difference"),
        ({}, {"summary/samples_per_second": 1e-9}, "expected. Below 0.3 of it a machine"),
        ({}, {"summary/samples_per_second": 150.0}, "expected. Below 0.3 of it a machine"),
        ({}, {"summary/steps": 19.0}, "measured 19 steps"),
        ({}, {"summary/steps": None}, "measured 0 steps"),
        ({}, {"summary/steps": math.nan}, "measured nan steps"),
        ({}, {"summary/data_wait_share": 0.34}, "waited for data in 34% of its steps' time"),
        ({}, {"summary/data_wait_share": math.nan}, "waited for data in nan%"),
        ({}, {"summary/nodes": None}, "logged no summary/nodes"),
        ({}, {"summary/devices": 1e18}, "it logged 1e+18 as summary/devices"),
        ({}, {"summary/devices": 2.5}, "it logged 2.5 as summary/devices"),
        ({}, {"summary/devices": math.nan}, "summary/devices"),
        ({}, {"summary/nodes": 2.0, "summary/devices": 3.0}, "do not have as many each"),
    ],
)
def test_a_run_that_tells_nothing_is_left_out_with_the_reason(
    log_run: Callable[..., StoredRun], tags: dict[str, str], metrics: dict[str, float], says: str
) -> None:
    run = log_run(tags, metrics)
    found, (reason,) = observe_runs([run])
    assert not found
    assert reason.startswith(f"{run.run_id} is left out: ")
    assert says in reason


def test_a_recorded_precision_that_is_no_word_is_not_taken(log_run: Callable[..., StoredRun]) -> None:
    hostile = {"trainer/precision": "${oc.env:HOME}", "data/batch_size": "{_target_: os.getcwd}"}
    (found,), _ = observe_runs([log_run(params=hostile)])
    assert (found.arguments["precision"], found.arguments["batch_size"]) == ("bf16-mixed", 128)


def test_a_run_named_twice_counts_once(log_run: Callable[..., StoredRun]) -> None:
    run = log_run()
    found, (reason,) = observe_runs([run, run])
    assert len(found) == 1
    assert "named twice" in reason


def test_an_unfinished_run_is_left_out(client: MlflowClient, store: str) -> None:
    run_id = client.create_run("0").info.run_id
    found, (reason,) = observe_runs([open_store(store).run(run_id)])
    assert not found
    assert "it is running" in reason


def test_a_training_here_says_that_it_ran_on_a_cpu(
    store: str,
    model: TinyModel,
    data: DataLoader[Any],
    make_trainer: Callable[..., Trainer],
    make_logger: Callable[..., JobMLFlowLogger],
) -> None:
    logger = make_logger(tracking_uri=store)
    make_trainer(logger=logger, callbacks=[ThroughputCallback(warmup_steps=2), RunReport()]).fit(model, data)
    logger.finalize()
    run = open_store(store).run(str(logger.run_id))
    assert run.metrics["summary/samples_per_second"] > 0
    assert run.tags["azureml_strategy.device"] == "cpu"
    _, (reason,) = observe_runs([run])
    assert "it ran on a CPU" in reason
