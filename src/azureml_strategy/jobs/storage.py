"""Uploads training data to Blob Storage and registers it as data assets and datastores.

A survey of the folder before the upload advises against a layout that makes training slow.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from azureml_strategy.jobs.client import quiet_sdk
from azureml_strategy.jobs.service_errors import JobError, service_errors

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import AzureBlobDatastore, Data, Datastore

_SHARDS = (".tar", ".tar.gz", ".tgz")  # of WebDataset
_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm")
# Azure ML's data loading guide asks for files of at least 4 MB: below that, requests cost more than bytes.
_SMALL_BYTES = 4_000_000
_MANY_FILES = 100_000
_SCHEMES = ("azureml", "https", "wasbs", "abfss")
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")  # "Storage account overview": names of storage accounts


@dataclass(frozen=True)
class DataSurvey:
    """What a folder holds, or one file.

    Attributes:
        size: bytes of all files.
        folders: number of folders that have files in them.
        kind: `shards`, `images in folders`, or `files`.
    """

    files: int
    size: int
    folders: int
    kind: str

    @property
    def advice(self) -> str | None:
        """What would make training on the data faster; None if nothing is needed."""
        if self.kind == "shards" or self.files < _MANY_FILES or self.size / self.files >= _SMALL_BYTES:
            return None
        return (
            f"{self.files:,} files of {self.size / self.files / 1000:,.0f} KB on average cost a request each, in the "
            "upload and in every epoch that does not find them on the node's disk. Pack them into tar shards of some "
            "100 MB, azureml-strategy data pack SRC OUT, or put them on premium storage and give the job a size with a "
            "local disk."
        )

    def __str__(self) -> str:
        return f"{self.files:,} file(s) in {self.folders:,} folder(s), {self.size / 1e9:,.2f} GB, {self.kind}"


def survey_data(path: Path) -> DataSurvey:
    """Survey a folder, following links, or one file.

    Raises:
        JobError: the path does not exist, or the folder has no files.
    """
    if not path.exists():
        raise JobError(f"There is no {path}. Give the folder or file to upload.")
    entries = list(_files(path)) if path.is_dir() else [(path.name, path.stat().st_size, str(path.parent))]
    if not entries:
        raise JobError(f"There are no files in {path}. Give the folder that holds the data.")
    names = [name.lower() for name, _, _ in entries]
    folders = {folder for _, _, folder in entries}
    kind = "files"
    if all(name.endswith((*_SHARDS, ".npz", ".json", ".idx", ".txt")) for name in names) and any(
        name.endswith(_SHARDS) for name in names
    ):
        kind = "shards"
    elif len(folders) > 1 and any(name.endswith(_IMAGES) for name in names):
        kind = "images in folders"
    return DataSurvey(len(entries), sum(size for _, size, _ in entries), len(folders), kind)


def _files(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Yield name, size and folder of each file. scandir asks the disk once per file, Path would ask twice."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _files(Path(entry.path))
            elif entry.is_file():
                yield entry.name, entry.stat().st_size, str(folder)


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """A data asset to create.

    Attributes:
        name: name of the asset.
        version: version of the asset. None takes the next number.
        description: text on the asset's page.
        datastore: datastore that receives an upload. None is the workspace's own storage account.
        tags: tags on the asset's page.
    """

    name: str
    version: str | None = None
    description: str | None = None
    datastore: str | None = None
    tags: dict[str, str] | None = None


def render_upload(request: DataRequest, path: Path) -> Data:
    """Describe a folder or file of this machine as a data asset, without a request to Azure."""
    return _asset(request, str(path.absolute()), "uri_folder" if path.is_dir() else "uri_file")


def render_registration(request: DataRequest, path: str, *, file: bool = False) -> Data:
    """Describe data that is already in storage as a data asset, without a request to Azure.

    Args:
        request: the asset to create.
        path: `azureml://datastores/NAME/paths/FOLDER/`, or the address of a folder in Blob or Data Lake storage.
        file: whether the path is one file.

    Raises:
        JobError: the path is not an address of storage, or the address contains a signature.
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
    """Describe a container of a standard or premium storage account as a datastore, without a request to Azure.

    The datastore holds no key: each job and user accesses the account with their own rights.

    Raises:
        JobError: the account is given by its address, or the name is invalid.
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

    return Data(**vars(request), path=path, type=kind)


@service_errors()
def create_data(client: MLClient, data: Data) -> Data:
    """Upload data that is on this machine and register it. The same content is not uploaded twice.

    Raises:
        ServiceError: the user has no permission for the storage account, there is no such datastore, or the version
            exists with another path.
    """
    made: Data = client.data.create_or_update(data)
    return made


@service_errors()
def attach_datastore(client: MLClient, datastore: Datastore) -> Datastore:
    """Register the datastore in the workspace.

    Raises:
        ServiceError: the user has no permission.
    """
    made: Datastore = client.datastores.create_or_update(datastore)
    return made


@service_errors()
def list_data(client: MLClient) -> tuple[list[Data], list[Datastore]]:
    """The data assets and the datastores of the workspace."""
    return list(client.data.list()), list(client.datastores.list())


@service_errors()
def show_data(client: MLClient, name: str) -> list[Data]:
    """Every version of a data asset, newest first.

    Raises:
        JobError: there is no data asset of this name.
    """
    versions = list(client.data.list(name=name))
    if not versions:
        raise JobError(f"There is no data asset {name}. `azureml-strategy data show` lists those there are.")
    return versions
