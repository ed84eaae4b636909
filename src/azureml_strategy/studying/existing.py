"""Runs that exist already."""

from __future__ import annotations

from collections.abc import Iterator

from azureml_strategy.studying.figures import Figures, read_figures
from azureml_strategy.studying.options import StudyOptions
from azureml_strategy.tracking.run import resolve_tracking_uri

WORKSPACE = "azureml"


def read_runs(options: StudyOptions) -> Iterator[Figures]:
    """Read the runs that the user has named.

    Raises:
        StudyError: the store has no such run.
        JobError: no workspace is configured.
        TrackingError: azureml-mlflow is missing.
    """
    from mlflow.tracking import MlflowClient

    client = MlflowClient(resolve_tracking_uri(_workspace_store() if options.store == WORKSPACE else options.store))
    for run_id in options.runs:
        yield read_figures(client, run_id)


def _workspace_store() -> str:
    from azureml_strategy.jobs import connect
    from azureml_strategy.jobs.metrics import tracking_uri

    return tracking_uri(connect())
