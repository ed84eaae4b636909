"""Reads the metrics of a job from MLflow, and finds the address of the store that holds them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from azureml_strategy.cluster.redaction import REDACTED
from azureml_strategy.jobs.service_errors import service_errors
from azureml_strategy.tracking.run import describe_store

if TYPE_CHECKING:
    from azure.ai.ml import MLClient


def tracking_uri(client: MLClient) -> str:
    """The address where MLflow finds the runs of a workspace: `azureml://...`. MLflow needs azureml-mlflow for it.

    Raises:
        ServiceError: Azure did not answer.
    """
    logging.getLogger("azureml").setLevel(logging.WARNING)  # azureml-mlflow logs the source of each setting
    with service_errors():
        workspace = client.workspaces.get(client.workspace_name)
    assert workspace is not None, "a workspace that is not there raises"
    return str(workspace.mlflow_tracking_uri)


def run_metrics(uri: str, run_id: str) -> dict[str, float]:
    """The last value of each metric.

    Args:
        uri: address of the MLflow store, see `tracking_uri`.
        run_id: id of the MLflow run, which is the job's name.

    Raises:
        mlflow.exceptions.MlflowException: there is no such run, or the service does not answer.
    """
    from mlflow import MlflowClient

    return dict(MlflowClient(uri).get_run(run_id).data.metrics)


def store_address(store: str, client: Callable[[], MLClient]) -> str:
    """Recover the full address of a store from its address without secrets.

    Args:
        store: address from `describe_store`. It must be complete, or be that of MLFLOW_TRACKING_URI or the workspace.
        client: returns the client of the workspace; called only if the store is the workspace's.

    Raises:
        ValueError: the address is none of these.
        ServiceError: Azure did not answer.
    """
    mine = os.environ.get("MLFLOW_TRACKING_URI", "")
    if mine and describe_store(mine) == store:
        return mine
    if store and REDACTED not in store:
        return store
    if store.startswith("azureml:"):
        return tracking_uri(client())
    raise ValueError(f"The file names its store without the secret part, {store}. Say where it is: --tracking-uri URI.")
