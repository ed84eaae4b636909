from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from mlflow.tracking import MlflowClient

from azureml_strategy.tracking import CostTracker, JobMLFlowLogger, RunReport, ThroughputCallback

MakeTrainer = Callable[..., Trainer]


def test_the_table_and_the_final_metrics(
    store: str,
    client: MlflowClient,
    model: Any,
    data: Any,
    make_trainer: MakeTrainer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = JobMLFlowLogger("the-experiment", run_name="the-run", tracking_uri=store)
    throughput = ThroughputCallback(unit="images")
    make_trainer(logger=logger, callbacks=[throughput, RunReport()]).fit(model, data, data)
    output = capsys.readouterr().out
    summary = throughput.summary()
    assert summary is not None
    rows = dict(line.strip("|").split("|") for line in output.splitlines() if line.startswith("|"))
    table = {name.strip(): text.strip() for name, text in rows.items() if name.strip()}  # long rows are wrapped
    assert list(table) == [
        *("images/s", "per device", "step time", "wall time", "step", "goodput"),
        *("val/top1", "run", "experiment", "store"),
    ]
    assert table["images/s"] == f"{summary.samples_per_second:,.1f}"
    assert table["step time"].endswith("(15 steps after warm-up)")
    assert table["val/top1"] == "0.7500"
    assert table["run"] == f"the-run ({logger.run_id})"
    page = f"http://127.0.0.1:5000/#/experiments/{logger.experiment_id}/runs/{logger.run_id}"
    assert f"Open the run: mlflow ui --backend-store-uri {store}\nThen its page is {page}\n" in output
    run = client.get_run(logger.run_id)
    metrics, tags = run.data.metrics, run.data.tags
    assert {
        name: tags[f"azureml_strategy.{name}"] for name in ("nodes", "devices", "data_parallel_size", "strategy")
    } == {
        **{"nodes": "1", "devices": "1", "data_parallel_size": "1"},
        "strategy": "SingleDeviceStrategy",
    }
    description = tags["mlflow.note.content"].splitlines()
    assert description[1] == tags["azureml_strategy.verdict"]
    assert description[3:6] == ["| | |", "|---|---|", f"| images/s | {summary.samples_per_second:,.1f} |"]
    assert "| val/top1 | 0.7500 |" in description
    assert metrics["summary/samples_per_second"] == summary.samples_per_second
    assert metrics["summary/data_wait_share"] == summary.data_wait_share


class Slow(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.02)


def test_a_callback_that_takes_most_of_the_steps_is_named(
    store: str,
    client: MlflowClient,
    model: Any,
    data: Any,
    make_trainer: MakeTrainer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = JobMLFlowLogger("the-experiment", tracking_uri=store)
    make_trainer(logger=logger, callbacks=[ThroughputCallback(), RunReport(), Slow()]).fit(model, data, data)
    tags = client.get_run(logger.run_id).data.tags
    assert tags["azureml_strategy.longest_hook"].startswith("Slow.on_train_batch_end, 2")
    assert "Look at Slow.on_train_batch_end, 2" in " ".join(capsys.readouterr().out.split())
    assert "Look at Slow.on_train_batch_end, 2" in tags["azureml_strategy.verdict"]


def test_says_when_nothing_was_measured(
    model: Any, data: Any, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = [ThroughputCallback(warmup_steps=5), RunReport(metrics=["val/loss"])]
    make_trainer(callbacks=callbacks, limit_train_batches=3).fit(model, data)
    output = capsys.readouterr().out
    assert "not measured: no step after the warm-up (5 steps)" in output
    assert "val/loss" in output
    assert "not logged" in output


class Remarking(RunReport):
    def remarks(self, trainer: Trainer) -> list[str]:
        return ["It waits for data."]


def test_the_description_of_a_job_s_run_keeps_what_its_user_wrote(
    client: MlflowClient, job_run: str, model: Any, data: Any, make_trainer: MakeTrainer
) -> None:
    client.set_tag(job_run, "mlflow.note.content", "For the *paper*.")
    for epochs in (1, 2):
        logger = JobMLFlowLogger()
        make_trainer(logger=logger, callbacks=[Remarking()], max_epochs=epochs).fit(model, data, data)
    written = client.get_run(job_run).data.tags["mlflow.note.content"]
    ours = "<!-- azureml-strategy -->\nIt waits for data.\n\n| | |\n|---|---|\n| wall time | 0:00:0"
    assert written.startswith(f"For the *paper*.\n\n{ours}")
    assert written.count("wall time") == 1


def test_no_point_of_a_metric_stands_twice(
    store: str, client: MlflowClient, model: Any, data: Any, make_trainer: MakeTrainer
) -> None:
    logger = JobMLFlowLogger("e", tracking_uri=store)
    callbacks = [ThroughputCallback(), CostTracker(price_per_hour=1.0), LearningRateMonitor("step"), RunReport()]
    make_trainer(logger=logger, callbacks=callbacks, max_epochs=2, log_every_n_steps=1).fit(model, data, data)
    names = client.get_run(logger.run_id).data.metrics
    steps = {name: [each.step for each in client.get_metric_history(logger.run_id, name)] for name in names}
    assert {"epoch", "train/loss", "val/top1", "lr-SGD", "cost/run", "summary/nodes"} <= steps.keys()
    assert steps["epoch"] == steps["train/loss"] == list(range(40))
    assert not [name for name, each in steps.items() if len(each) != len(set(each))]
