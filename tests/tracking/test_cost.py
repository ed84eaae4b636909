from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from mlflow.tracking import MlflowClient

from azureml_strategy.cluster.job import Price
from azureml_strategy.tracking import CostTracker, JobMLFlowLogger, RunReport, ThroughputCallback
from azureml_strategy.tracking.cost import process_age_s

MakeTrainer = Callable[..., Trainer]


class Clock:
    """Seconds that pass when a test says so: five for each batch."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Passing(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.clock.now += 5.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The process was started 40 seconds before the clock's beginning, or so much is paid for."""
    clock = Clock()
    monkeypatch.setattr(CostTracker, "_paid_until", clock.now - 40)
    return clock


def values(client: MlflowClient, run_id: str, name: str) -> set[float]:
    return {round(metric.value, 6) for metric in client.get_metric_history(run_id, name)}


def test_nodes_times_price_times_time(
    store: str,
    client: MlflowClient,
    model: Any,
    data: Any,
    make_trainer: MakeTrainer,
    clock: Clock,
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = JobMLFlowLogger("e", tracking_uri=store)
    cost, throughput = CostTracker(price_per_hour=36.0, clock=clock), ThroughputCallback(unit="images")
    callbacks = [Passing(clock), throughput, cost, RunReport()]
    make_trainer(logger=logger, callbacks=callbacks, max_epochs=2).fit(model, data)
    # 36 an hour is a cent a second; 40 seconds of start-up and 2 epochs of 20 batches
    assert cost.so_far == pytest.approx(0.40 + 2.00)
    clock.now += 1000
    assert cost.so_far == pytest.approx(2.40)
    run = client.get_run(logger.run_id)
    assert values(client, logger.run_id, "cost/run") == {2.4}
    summary = throughput.summary()
    assert summary is not None
    assert run.data.metrics["cost/per_million_samples"] == pytest.approx(1e4 / summary.samples_per_second)
    assert run.data.tags["cost.price_per_hour"] == "36.0"
    assert run.data.tags["cost.currency"] == "USD"
    assert "cost.date" not in run.data.tags
    output = " ".join(capsys.readouterr().out.split())
    assert "| cost | 2.40 USD (1 node x 36 USD/h, tracking.cost.price_per_hour) |" in output
    assert "| cost of 10^6 images |" in output


def test_the_jobs_variables_tell_the_price_and_an_earlier_attempt_counts(
    job_run: str,
    client: MlflowClient,
    model: Any,
    data: Any,
    make_trainer: MakeTrainer,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in Price(36.0, "EUR", "Azure Retail Prices", "2026-11-20").as_variables().items():
        monkeypatch.setenv(name, value)
    client.log_metric(job_run, "cost/run", 7.0)
    callbacks = [Passing(clock), CostTracker(clock=clock)]
    make_trainer(logger=JobMLFlowLogger(), callbacks=callbacks).fit(model, data)
    run = client.get_run(job_run)
    assert run.data.metrics["cost/run"] == pytest.approx(7.0 + 0.40 + 1.00)
    assert run.data.tags["cost.source"] == "Azure Retail Prices"
    assert run.data.tags["cost.date"] == "2026-11-20"
    # a second run in this process pays from where the first one ended
    clock.now += 10
    second = CostTracker(clock=clock)
    make_trainer(callbacks=[Passing(clock), second]).fit(model, data)
    assert second.so_far == pytest.approx(0.10 + 1.00)


def test_a_run_that_fails_has_cost_too(
    store: str, client: MlflowClient, model: Any, data: Any, make_trainer: MakeTrainer, clock: Clock
) -> None:
    class Failing(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            raise RuntimeError("no more")

    logger = JobMLFlowLogger("e", tracking_uri=store)
    callbacks = [Passing(clock), CostTracker(price_per_hour=36.0, clock=clock), Failing()]
    with pytest.raises(RuntimeError, match="no more"):
        make_trainer(logger=logger, callbacks=callbacks).fit(model, data)
    assert client.get_run(logger.run_id).data.metrics["cost/run"] == pytest.approx(0.45)


def test_without_a_price_there_is_no_cost(
    store: str,
    client: MlflowClient,
    model: Any,
    data: Any,
    make_trainer: MakeTrainer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = JobMLFlowLogger("e", tracking_uri=store)
    throughput = ThroughputCallback(unit="images")
    make_trainer(logger=logger, callbacks=[throughput, CostTracker(), RunReport()]).fit(model, data)
    run = client.get_run(logger.run_id)
    assert not [name for name in (*run.data.metrics, *run.data.tags) if name.startswith("cost")]
    assert "cost" not in capsys.readouterr().out
    assert (run.data.metrics["summary/nodes"], run.data.metrics["summary/devices"]) == (1.0, 1.0)
    assert run.data.tags["throughput.unit"] == "images"


def test_refuses_a_price_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"tracking\.cost.price_per_hour says -1 USD"):
        CostTracker(price_per_hour=-1)


def test_the_age_of_a_process() -> None:
    import psutil

    assert process_age_s() == pytest.approx(time.time() - psutil.Process(os.getpid()).create_time(), abs=3.0)
