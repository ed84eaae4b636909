from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Trainer
from mlflow.tracking import MlflowClient

from azureml_strategy.tracking import JobMLFlowLogger, RunReport, ThroughputCallback

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
    table = {name.strip(): text.strip() for name, text in rows.items()}
    assert list(table) == [
        *("images/s", "per device", "step time", "data wait", "wall time"),
        *("val/top1", "run", "experiment", "store"),
    ]
    assert table["images/s"] == f"{summary.samples_per_second:,.1f}"
    assert table["step time"].endswith("(15 steps after warm-up)")
    assert table["val/top1"] == "0.7500"
    assert table["run"] == f"the-run ({logger.run_id})"
    assert f"Open the run: mlflow ui --backend-store-uri {store}\n" in output
    metrics = client.get_run(logger.run_id).data.metrics
    assert metrics["summary/samples_per_second"] == summary.samples_per_second
    assert metrics["summary/data_wait_share"] == summary.data_wait_share


def test_says_when_nothing_was_measured(
    model: Any, data: Any, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = [ThroughputCallback(warmup_steps=5), RunReport(metrics=["val/loss"])]
    make_trainer(callbacks=callbacks, limit_train_batches=3).fit(model, data)
    output = capsys.readouterr().out
    assert "not measured: all steps were warm-up (5)" in output
    assert "val/loss" in output
    assert "not logged" in output
