"""Training data in Blob Storage: data assets, and the datastores they lie in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from azureml_strategy.jobs.errors import JobError
from azureml_strategy.jobs.quiet import quiet_sdk
from azureml_strategy.jobs.service_errors import service_errors

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import AzureBlobDatastore, Data, Datastore

_SCHEMES = ("azureml", "https", "wasbs", "abfss")
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")  # "Storage account overview": names of storage accounts


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """A data asset to make.

    Attributes:
        name: of the asset.
        version: None: the next number.
        description, tags: for its page.
        datastore: where an upload goes; None: the workspace's own storage account.
    """

    name: str
    version: str | None = None
    description: str | None = None
    datastore: str | None = None
    tags: dict[str, str] | None = None


def render_upload(request: DataRequest, path: Path) -> Data:
    """A data asset of what lies here; nothing is asked of Azure.

    Args:
        request: what to call it.
        path: folder or file.
    """
    return _asset(request, str(path.absolute()), "uri_folder" if path.is_dir() else "uri_file")


def render_registration(request: DataRequest, path: str, *, file: bool = False) -> Data:
    """A data asset of what lies in storage already; nothing is asked of Azure.

    Args:
        request: what to call it.
        path: `azureml://datastores/NAME/paths/FOLDER/`, or the address of a folder in Blob or Data Lake storage.
        file: whether it is one file.

    Raises:
        JobError: the path is on this machine, or its address has a signature in it.
    """
    parts = urlsplit(path)
    if parts.scheme not in _SCHEMES:
        raise JobError(
            f"{path} is no address of storage. Type azureml://datastores/NAME/paths/FOLDER/ or "
            "https://ACCOUNT.blob.core.windows.net/CONTAINER/FOLDER/; what lies on this machine goes up with "
            "`azureml-strategy data upload`."
        )
    if parts.query:
        raise JobError(
            "The address ends in a query, which for storage is a shared access signature: a secret that everybody "
            "with access to the workspace could read. Leave it out, and attach the account with `azureml-strategy data "
            "attach`."
        )
    return _asset(request, path, "uri_file" if file else "uri_folder")


def render_datastore(name: str, account: str, container: str, description: str | None = None) -> AzureBlobDatastore:
    """A datastore on a container of a storage account, standard or premium; nothing is asked of Azure.

    It holds no key: each job and user reaches the account by rights of their own.

    Raises:
        JobError: the account is given by its address, or no account can have this name.
    """
    if not _ACCOUNT.fullmatch(account):
        raise JobError(
            f"{account!r} is not the name of a storage account: 3 to 24 lower-case letters and digits, without "
            ".blob.core.windows.net."
        )
    quiet_sdk()
    from azure.ai.ml.entities import AzureBlobDatastore

    return AzureBlobDatastore(name=name, account_name=account, container_name=container, description=description)


def _asset(request: DataRequest, path: str, kind: str) -> Data:
    quiet_sdk()
    from azure.ai.ml.entities import Data

    return Data(
        name=request.name,
        version=request.version,
        description=request.description,
        tags=request.tags,
        path=path,
        type=kind,
        datastore=request.datastore,
    )


def create_data(client: MLClient, data: Data) -> Data:
    """Upload what is here and register it; the same content is not sent a second time.

    Raises:
        ServiceError: no permission for the storage account, no such datastore, or the version exists with another path.
    """
    with service_errors():
        made: Data = client.data.create_or_update(data)
    return made


def attach_datastore(client: MLClient, datastore: Datastore) -> Datastore:
    """Make the datastore known to the workspace.

    Raises:
        ServiceError: no permission.
    """
    with service_errors():
        made: Datastore = client.datastores.create_or_update(datastore)
    return made


def list_data(client: MLClient) -> tuple[list[Data], list[Datastore]]:
    """The data assets of the workspace, and its datastores."""
    with service_errors():
        return list(client.data.list()), list(client.datastores.list())


def show_data(client: MLClient, name: str) -> list[Data]:
    """Every version of a data asset, the newest first.

    Raises:
        JobError: there is none of this name.
    """
    with service_errors():
        versions = list(client.data.list(name=name))
    if not versions:
        raise JobError(f"There is no data asset {name}. `azureml-strategy data show` lists those there are.")
    return versions
