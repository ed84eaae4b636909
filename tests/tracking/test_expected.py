"""The rate that was expected of a run: how it is read, when it may be compared, and what the end of a run says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from mlflow.tracking import MlflowClient

from azureml_strategy.cluster.environ import EXPECTED_RATE_VARIABLE
from azureml_strategy.tracking import JobMLFlowLogger, RunReport, ThroughputCallback
from azureml_strategy.tracking.expected import (
    EXPECTED_RATE_METRIC,
    EXPECTED_RATE_TAG,
    LEAST_STEPS,
    ExpectedRate,
    RateCheck,
    RunSetting,
    expected_of_run,
    may_expect,
    parse_expected_rate,
)
from azureml_strategy.tracking.verdict import judge

MakeTrainer = Callable[..., Trainer]
EXPECTED = ExpectedRate(
    unit="images",
    samples_per_step=4096,
    vm_size="Standard_ND96isr_H100_v5",
    gpu="H100",
    nodes=2,
    devices=16,
    strategy="AzureMLDDPStrategy",
    precision="bf16-mixed",
    samples_per_second=2400.0,
    low=1900.0,
    high=3100.0,
)
RUN = RunSetting(
    unit="images",
    samples_per_step=4096.0,
    vm_size="Standard_ND96isr_H100_v5",
    gpu="H100",
    nodes=2,
    devices=16,
    strategy="AzureMLDDPStrategy",
    precision="bf16-mixed",
)


def test_the_text_of_a_job_is_read_back() -> None:
    text = replace(EXPECTED, samples_per_second=2400.123456789).to_text()
    assert parse_expected_rate(text) == replace(EXPECTED, samples_per_second=2400.12)
    assert "\n" not in text


@pytest.mark.parametrize(
    "changed",
    [
        *({"samples_per_second": value} for value in (math.nan, math.inf, -1, 0, "fast", None, [1], 10**400, 5000)),
        *({"low": value} for value in (math.nan, -math.inf, 2500)),
        *({"nodes": 0}, {"devices": None}, {"vm_size": 3}, {"unit": None}, {"samples_per_step": math.inf}),
        {"more": 1},
    ],
)
def test_what_cannot_be_read_is_no_expectation(changed: dict[str, object]) -> None:
    assert parse_expected_rate(json.dumps({**asdict(EXPECTED), **changed})) is None


@pytest.mark.parametrize("text", ["", "2400", "garbage", "[]", "null", "{}", '"x"', "[" * 100_000, "\x00", "NaN"])
def test_garbage_is_no_expectation(text: str) -> None:
    assert parse_expected_rate(text) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"gpu": ""},  # a CPU, or a GPU that nobody knows
        {"gpu": "A100"},
        {"nodes": 1},
        {"devices": 8},
        {"unit": "samples"},
        {"strategy": "PipelineStrategy"},
        {"precision": "32-true"},
        {"vm_size": "Standard_NC40ads_H100_v5"},
        {"samples_per_step": 2048.0},
        {"samples_per_step": 8192.0},
    ],
)
def test_a_run_of_another_setting_is_not_compared(changed: dict[str, Any]) -> None:
    assert not EXPECTED.applies_to(replace(RUN, **changed))


def test_a_run_of_the_planned_setting_is_compared() -> None:
    assert EXPECTED.applies_to(RUN)
    assert EXPECTED.applies_to(replace(RUN, vm_size=""))  # not every job is told its size
    assert EXPECTED.applies_to(replace(RUN, vm_size="STANDARD_ND96ISR_H100_V5"))
    assert EXPECTED.applies_to(replace(RUN, samples_per_step=4050.0))  # the last batch of an epoch is smaller


def test_half_of_what_it_should_be_says_where_to_look() -> None:
    shares = {"data_wait": 0.5, "forward": 0.2, "backward": 0.3}
    told = RateCheck(EXPECTED, 1200.0).sentence(judge(shares))
    assert told == (
        "1,200 images/s are 50% of what 2 x Standard_ND96isr_H100_v5 should do, below 70%: the planner expected 2,400 "
        "images/s (1,900 to 3,100). Look first at what it waits for most: waiting for data (50% of its time)."
    )
    busy = RateCheck(EXPECTED, 1200.0).sentence(judge({"data_wait": 0.0, "forward": 0.4, "backward": 0.6}))
    assert "`azureml-strategy doctor` and `azureml-strategy bench` on 2 nodes" in busy
    alone = RateCheck(replace(EXPECTED, nodes=1), 1200.0).sentence(judge({}))
    assert "bench" not in alone


@pytest.mark.parametrize(("share", "slow"), [(0.5, True), (0.69, True), (0.71, False), (0.9, False), (1.4, False)])
def test_below_seven_tenths_it_is_slow(share: float, slow: bool) -> None:
    check = RateCheck(EXPECTED, 2400 * share)
    assert check.is_slow == slow
    assert bool(check.sentence(judge({}))) == slow
    assert check.row == f"2,400 images/s (1,900 to 3,100) of 2 x Standard_ND96isr_H100_v5; {share:.0%} of it"
    assert check.error == pytest.approx(1 / share - 1)


def test_emulated_runs_have_no_expectation() -> None:
    tags = {EXPECTED_RATE_TAG: EXPECTED.to_text()}
    assert expected_of_run(tags) == EXPECTED
    assert expected_of_run(tags | {"azureml_strategy.emulated": "true"}) is None
    assert expected_of_run({EXPECTED_RATE_TAG: "{"}) is None
    known = {"azureml_strategy.recipe": "resnet50_imagenet", "network.vm_size": "Standard_ND96isr_H100_v5"}
    assert may_expect(known, {"summary/mfu": 0.3})
    assert not may_expect(known, {})
    assert not may_expect(known | {"azureml_strategy.emulated": "true"}, {"summary/mfu": 0.3})
    assert not may_expect({"azureml_strategy.recipe": "resnet50_imagenet"}, {"summary/mfu": 0.3})


def fit(store: str, model: Any, data: Any, make_trainer: MakeTrainer) -> tuple[JobMLFlowLogger, float]:
    """Train for a moment; return the run's logger and its rate."""
    logger, throughput = JobMLFlowLogger("e", tracking_uri=store), ThroughputCallback(unit="images")
    make_trainer(logger=logger, callbacks=[throughput, RunReport()]).fit(model, data, data)
    summary = throughput.summary()
    assert summary is not None
    return logger, summary.samples_per_second


def of_the_run(data: Any, rate: float) -> ExpectedRate:
    """What would be expected of the run that `fit` makes, if it had a GPU."""
    given = {"nodes": 1, "devices": 1, "strategy": "SingleDeviceStrategy", "precision": "32-true"}
    ranged = {"samples_per_second": rate, "low": rate / 2, "high": 2 * rate}
    return replace(EXPECTED, samples_per_step=data.batch_size, **given, **ranged)


def test_a_run_on_a_cpu_says_nothing(
    store: str,
    client: MlflowClient,
    model: Any,
    data: Any,
    make_trainer: MakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(EXPECTED_RATE_VARIABLE, of_the_run(data, 1e9).to_text())
    logger, _ = fit(store, model, data, make_trainer)
    run = client.get_run(logger.run_id)
    assert "should do" not in capsys.readouterr().out
    assert EXPECTED_RATE_TAG not in run.data.tags
    assert EXPECTED_RATE_METRIC not in run.data.metrics


@pytest.mark.parametrize("text", ["NaN", "{", "-1", '{"samples_per_second": "x"}'])
def test_a_wrong_variable_stops_no_run(
    store: str, model: Any, data: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(EXPECTED_RATE_VARIABLE, text)
    _, rate = fit(store, model, data, make_trainer)
    assert rate > 0


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU of this machine has the name of a GPU, as there is none."""
    monkeypatch.setattr("azureml_strategy.tracking.report._gpu_model", lambda device: "H100")
    monkeypatch.setattr("azureml_strategy.tracking.report.LEAST_STEPS", 1)


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize("is_slow", [True, False])
def test_the_end_of_a_run_names_the_expected_rate(
    is_slow: bool,
    store: str,
    client: MlflowClient,
    model: Any,
    data: Any,
    make_trainer: MakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = of_the_run(data, 1e9 if is_slow else 1e-3)
    monkeypatch.setenv(EXPECTED_RATE_VARIABLE, expected.to_text())
    logger, _ = fit(store, model, data, make_trainer)
    output, run = capsys.readouterr().out, client.get_run(logger.run_id)
    assert "| expected" in output
    assert ("of what 1 x Standard_ND96isr_H100_v5 should do" in output) == is_slow
    assert ("should do" in run.data.tags["mlflow.note.content"]) == is_slow
    assert expected_of_run(run.data.tags) == expected
    assert run.data.metrics[EXPECTED_RATE_METRIC] == expected.samples_per_second


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize("changed", [{"nodes": 2}, {"precision": "bf16-mixed"}, {"samples_per_step": 10_000}])
def test_a_run_that_was_changed_is_not_judged(
    changed: dict[str, Any],
    store: str,
    client: MlflowClient,
    model: Any,
    data: Any,
    make_trainer: MakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(EXPECTED_RATE_VARIABLE, replace(of_the_run(data, 1e9), **changed).to_text())
    logger, _ = fit(store, model, data, make_trainer)
    assert EXPECTED_RATE_TAG not in client.get_run(logger.run_id).data.tags


@pytest.mark.usefixtures("h100")
def test_a_few_steps_are_not_judged(
    store: str, client: MlflowClient, model: Any, data: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("azureml_strategy.tracking.report.LEAST_STEPS", LEAST_STEPS)
    monkeypatch.setenv(EXPECTED_RATE_VARIABLE, of_the_run(data, 1e9).to_text())
    logger, _ = fit(store, model, data, make_trainer)
    assert EXPECTED_RATE_TAG not in client.get_run(logger.run_id).data.tags


def test_a_comparison_of_other_nodes_is_not_that_of_a_resumed_run() -> None:
    tags = {EXPECTED_RATE_TAG: EXPECTED.to_text(), "azureml_strategy.nodes": "2", "azureml_strategy.devices": "16"}
    assert expected_of_run(tags) == EXPECTED
    assert expected_of_run(tags | {"azureml_strategy.nodes": "1", "azureml_strategy.devices": "8"}) is None


@pytest.mark.usefixtures("h100")
def test_accumulated_batches_are_one_step(
    store: str, client: MlflowClient, model: Any, data: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = replace(of_the_run(data, 1e9), samples_per_step=2 * data.batch_size)
    monkeypatch.setenv(EXPECTED_RATE_VARIABLE, expected.to_text())
    logger = JobMLFlowLogger("e", tracking_uri=store)
    callbacks = [ThroughputCallback(unit="images", warmup_steps=1), RunReport()]
    make_trainer(logger=logger, callbacks=callbacks, accumulate_grad_batches=2).fit(model, data, data)
    assert EXPECTED_RATE_TAG in client.get_run(logger.run_id).data.tags


@pytest.mark.usefixtures("h100")
def test_emulated_nodes_say_nothing(
    store: str, client: MlflowClient, model: Any, data: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZ_BATCHAI_CLUSTER_NAME", "emulated")
    monkeypatch.setenv(EXPECTED_RATE_VARIABLE, of_the_run(data, 1e9).to_text())
    logger, _ = fit(store, model, data, make_trainer)
    assert EXPECTED_RATE_TAG not in client.get_run(logger.run_id).data.tags


def test_a_cpu_has_no_model() -> None:
    from azureml_strategy.tracking.report import _gpu_model

    assert _gpu_model(torch.device("cpu")) == ""
