"""Reads the metrics of a job from MLflow, and finds the address of the store that holds them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from azureml_strategy.cluster.redaction import REDACTED
from azureml_strategy.jobs.service_errors import service_errors
from azureml_strategy.tracking.run import describe_store

_LOOPBACK = ("127.0.0.1", "localhost", "::1")

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
    """Find the store that a file names. No token goes to a host that only the file names.

    Args:
        store: address from `describe_store`. It must be that of MLFLOW_TRACKING_URI or of the workspace, or a store on
            this machine.
        client: returns the client of the workspace; called only if the store is a workspace's.

    Raises:
        ValueError: the address is none of these.
        ServiceError: Azure did not answer.
    """
    mine = os.environ.get("MLFLOW_TRACKING_URI", "")
    if mine and describe_store(mine) == store:
        return mine
    if store.startswith("azureml:"):
        found = tracking_uri(client())
        if _workspace(store) in (_workspace(found), _workspace(describe_store(found))):
            return found
        raise ValueError(
            f"The file names the store {store}, and the workspace's is {describe_store(found)}. If the file is yours, "
            "name its workspace by the options of this command, or the store: --tracking-uri URI."
        )
    if REDACTED not in store and _is_here(store):
        return store
    raise ValueError(
        f"The file names the store {store or 'nowhere'}, which is neither on this machine without a sign-in nor that "
        "of MLFLOW_TRACKING_URI. Metrics and a token would go to whomever the file names. If it is right, type it: "
        "--tracking-uri URI."
    )


def _workspace(uri: str) -> str:
    """What tells a workspace from others, whatever region's host and version of its service answer for it."""
    path = unquote(urlsplit(uri).path).lower().rstrip("/")
    return path[max(0, path.find("/subscriptions/")) :]


def _is_here(store: str) -> bool:
    """Whether a store is a file, or a server of this machine for which nobody signs in."""
    from mlflow.environment_variables import MLFLOW_TRACKING_AUTH, MLFLOW_TRACKING_AWS_SIGV4, MLFLOW_TRACKING_TOKEN
    from mlflow.utils.credentials import read_mlflow_creds

    address = urlsplit(store)
    if address.scheme in ("sqlite", "file", ""):
        return bool(address.path) and not address.netloc
    kinds: Iterable[Any] = (MLFLOW_TRACKING_TOKEN, MLFLOW_TRACKING_AUTH, MLFLOW_TRACKING_AWS_SIGV4)
    signs_in = any((*read_mlflow_creds(), *(each.get() for each in kinds)))
    return address.scheme in ("http", "https") and address.hostname in _LOOPBACK and not signs_in
