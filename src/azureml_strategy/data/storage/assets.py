"""Finds the container behind a data asset or a datastore of an Azure ML workspace."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from azureml_strategy.cluster.job import read_job
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.data.storage.addresses import BlobFolder, DataAsset, DatastoreFolder, make_folder, parse_address
from azureml_strategy.data.storage.credentials import find_identity, lent_variables
from azureml_strategy.data.storage.folder import StorageError
from azureml_strategy.lazy import install_line

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

_NO_WORKSPACE = (
    "No workspace is known here. In a job Azure ML names it; elsewhere download config.json from the workspace's page "
    "in Azure ML Studio into this folder, or type the address with its workspace: "
    "azureml://subscriptions/ID/resourcegroups/GROUP/workspaces/NAME/datastores/NAME/paths/PATH"
)


def find_folder(place: BlobFolder | DatastoreFolder | DataAsset, environ: Mapping[str, str]) -> BlobFolder:
    """Find where an address leads. For an asset or a datastore this asks the workspace, and takes seconds.

    Raises:
        StorageError: there is no such data asset or datastore, it may not be read, or it is not in Blob Storage.
    """
    if isinstance(place, BlobFolder):
        return place
    with lent_variables(environ):
        if isinstance(place, DataAsset):
            address = _asset_path(place, environ)
            # Recipes read the folders `train` and `val` of an asset.
            found = parse_address(f"{address.rstrip('/')}/{place.path}".rstrip("/"), environ)
            if isinstance(found, DataAsset):
                raise StorageError(f"The data asset leads to {address}, which is no folder.")
            if isinstance(found, BlobFolder):
                return found
            place = found
        return _datastore_folder(place, environ)


def _asset_path(asset: DataAsset, environ: Mapping[str, str]) -> str:
    from azure.core.exceptions import AzureError

    client = _client(None, environ)
    shown = f"The data asset azureml:{asset.name}" + (f":{asset.version}" if asset.version else "@latest")
    try:
        found = client.data.get(asset.name, **({"version": asset.version} if asset.version else {"label": "latest"}))
    except (AzureError, ValueError) as error:  # azure-ai-ml's own errors are ValueErrors or AzureErrors
        raise StorageError(
            f"{shown} cannot be had from the workspace {client.workspace_name}: {_first_line(error, environ)}. "
            "`azureml-strategy data show` lists the data assets and their versions."
        ) from error
    return str(found.path)


def _datastore_folder(place: DatastoreFolder, environ: Mapping[str, str]) -> BlobFolder:
    from azure.ai.ml.entities import AzureBlobDatastore, AzureDataLakeGen2Datastore
    from azure.core.exceptions import AzureError

    client = _client(place.workspace, environ)
    try:
        found = client.datastores.get(place.datastore)
    except (AzureError, ValueError) as error:
        raise StorageError(
            f"The datastore {place.datastore} cannot be had from the workspace {client.workspace_name}: "
            f"{_first_line(error, environ)}. `azureml-strategy data show` lists the datastores."
        ) from error
    if isinstance(found, AzureBlobDatastore):
        container = found.container_name
    elif isinstance(found, AzureDataLakeGen2Datastore):
        container = found.filesystem
    else:
        raise StorageError(
            f"The datastore {place.datastore} is of the kind {type(found).__name__}, and only Blob Storage and Data "
            "Lake Gen2 can be read without a mount. Give the data as an input of the job, which mounts it."
        )
    return make_folder(found.account_name, container, place.path, environ, found.endpoint or "core.windows.net")


def _client(workspace: tuple[str, str, str] | None, environ: Mapping[str, str]) -> MLClient:
    warnings.filterwarnings("ignore", module=r"azure\.ai\.ml")
    try:
        from azure.ai.ml import MLClient
    except ImportError as error:
        raise StorageError(
            "Data assets and datastores are looked up by azure-ai-ml, which is not installed. Type: "
            f"{install_line('azure')}"
        ) from error
    logging.getLogger("azure.ai.ml").setLevel(logging.CRITICAL)  # failures are raised as well
    identity = find_identity(environ)
    job = read_job(environ)
    if workspace is None and job and job.subscription and job.resource_group and job.workspace:
        workspace = (job.subscription, job.resource_group, job.workspace)
    if workspace is not None:
        return MLClient(identity, *workspace, enable_telemetry=False)
    from azure.core.exceptions import AzureError

    try:
        return MLClient.from_config(identity, enable_telemetry=False)
    except AzureError as error:
        raise StorageError(_NO_WORKSPACE) from error


def _first_line(error: Exception, environ: Mapping[str, str]) -> str:
    text = redact_text(str(error), environ).strip()
    return (text.splitlines() or [type(error).__name__])[0].rstrip(".")
