"""What the planner expected of each size of a study, and how far it was right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from tests.study.conftest import MakeRun
from tests.study.test_run import table
from tests.tracking.test_expected import EXPECTED

from azureml_strategy.cli import main
from azureml_strategy.tracking.expected import EXPECTED_RATE_TAG


def test_planned_stands_beside_measured(
    make_run: MakeRun, store: MlflowClient, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, old = make_run(1, 1000.0), make_run(2, 1800.0), make_run(4, 3200.0)
    for run, rate in ((one, 1100.0), (two, 3600.0)):
        told = replace(EXPECTED, samples_per_second=rate, low=0.9 * rate, high=1.2 * rate)
        store.set_tag(run, EXPECTED_RATE_TAG, told.to_text())
    assert main(["study", "--runs", f"{one},{two},{old}"]) == 0
    output = capsys.readouterr().out
    heading, *rows = table(output)
    planned, error = heading.index("planned images/s"), heading.index("error")
    assert [row[planned] for row in rows] == ["1,100.0", "3,600.0", "-"]
    assert [row[error] for row in rows] == ["+10%", "+100%", "-"]
    assert "the error is planned / measured - 1" in output
    written = json.loads(Path("outputs/study.json").read_text())["runs"]
    assert [run["expected_samples_per_second"] for run in written] == [1100.0, 3600.0, None]
    assert [run["expected_low"] for run in written] == [990.0, 3240.0, None]
    assert [run["prediction_error"] for run in written] == [pytest.approx(0.1), pytest.approx(1.0), None]
    assert main(["report", "outputs/study.json"]) == 0
    page = Path("report.html").read_text()
    assert "planned images/s" in page
    assert "3,600.0" in page


def test_runs_without_a_plan_have_no_column(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "--runs", f"{make_run(1, 10.0)},{make_run(2, 19.0)}"]) == 0
    heading, *_ = table(capsys.readouterr().out)
    assert "error" not in heading


def test_an_emulated_run_has_none(make_run: MakeRun, store: MlflowClient, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(1, 10.0)
    store.set_tag(run, EXPECTED_RATE_TAG, EXPECTED.to_text())
    store.set_tag(run, "azureml_strategy.emulated", "true")
    assert main(["study", "--runs", run]) == 0
    assert "planned" not in capsys.readouterr().out
