"""Whether metrics reach the job's run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from azureml_strategy.network.doctor.tracking import check_tracking

ReadFacts = Callable[..., Any]


@pytest.mark.parametrize(
    ("uri", "text"),
    [(None, "mlflow.db in the working directory"), ("http://user:secret@host:5000", "http store"), ("", "mlflow.db")],
)
def test_outside_a_job(read: ReadFacts, uri: str | None, text: str) -> None:
    (finding,) = check_tracking(read({} if uri is None else {"MLFLOW_TRACKING_URI": uri}))
    assert finding.verdict == "ok"
    assert text in finding.text
    assert "secret" not in finding.text


def test_in_a_job(read: ReadFacts, job: ReadFacts) -> None:
    (finding,) = check_tracking(read(job()))
    assert (finding.verdict, finding.text) == ("ok", "azureml store, run quirky_plum")


def test_azure_store_without_its_plugin(read: ReadFacts, job: ReadFacts) -> None:
    (finding,) = check_tracking(read(job(), **{"azureml-mlflow": None}))
    assert finding.verdict == "problem"
    assert finding.advice == "pip install 'azureml-strategy[azure]'"


@pytest.mark.parametrize(
    "missing", [["MLFLOW_RUN_ID"], ["MLFLOW_TRACKING_URI"], ["MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"]]
)
def test_a_job_that_lost_its_run(read: ReadFacts, job: ReadFacts, missing: list[str]) -> None:
    environ = {name: value for name, value in job().items() if name not in missing}
    (finding,) = check_tracking(read(environ))
    assert finding.verdict == "warning"
    assert finding.text.startswith(f"{' and '.join(missing)} not set")
