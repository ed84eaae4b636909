"""Data assets and datastores of a workspace lead to the container that they are in."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from tests.data.azurite import ACCOUNT, Azurite
from tests.jobs.azure_service import GROUP, SUBSCRIPTION, WORKSPACE, AzureService

from azureml_strategy.data.storage import StorageError, open_storage
from azureml_strategy.data.storage.addresses import BlobFolder, parse_address
from azureml_strategy.data.storage.assets import find_folder

LONG = f"azureml://subscriptions/{SUBSCRIPTION}/resourcegroups/{GROUP}/workspaces/{WORKSPACE}/"
JOB = {
    "AZUREML_RUN_ID": "run",
    "AZUREML_ARM_SUBSCRIPTION": SUBSCRIPTION,
    "AZUREML_ARM_RESOURCEGROUP": GROUP,
    "AZUREML_ARM_WORKSPACE_NAME": WORKSPACE,
}


def add_asset(service: AzureService, version: str, uri: str) -> None:
    properties = {"dataType": "uri_folder", "dataUri": uri, "isAnonymous": False, "isArchived": False}
    name = f"data/imagenet/versions/{version}"
    identity = f"{service.workspace.id}/{name}"
    service.workspace.resources[name] = {"id": identity, "name": version, "properties": properties}


def add_datastore(service: AzureService, name: str, **properties: Any) -> None:
    given = {
        "endpoint": "core.windows.net",
        "protocol": "https",
        "credentials": {"credentialsType": "None"},
        **properties,
    }
    identity = f"{service.workspace.id}/datastores/{name}"
    service.workspace.resources[f"datastores/{name}"] = {"id": identity, "name": name, "properties": given}


def found(address: str, environ: dict[str, str] | None = None) -> BlobFolder:
    environ = {**os.environ, **(JOB if environ is None else environ)}
    return find_folder(parse_address(address, environ), environ)


def test_where_they_lead(azure_service: AzureService) -> None:
    add_datastore(azure_service, "fast", datastoreType="AzureBlob", accountName="fastimages", containerName="training")
    add_datastore(azure_service, "lake", datastoreType="AzureDataLakeGen2", accountName="lakes", filesystem="sea")
    add_asset(azure_service, "1", f"{LONG}datastores/fast/paths/imagenet/one/")
    add_asset(azure_service, "2", "https://elsewhere.blob.core.windows.net/images/two")
    fast = "https://fastimages.blob.core.windows.net"
    assert found("azureml:imagenet:1") == BlobFolder("fastimages", "training", "imagenet/one", fast)
    assert found("azureml:imagenet:1/train") == BlobFolder("fastimages", "training", "imagenet/one/train", fast)
    assert found("azureml:imagenet@latest").account == "elsewhere"
    assert found("azureml:imagenet@latest/val").path == "two/val"
    assert found("azureml://datastores/fast/paths/a/b") == BlobFolder("fastimages", "training", "a/b", fast)
    assert found(f"{LONG}datastores/lake/paths/a", {}).container == "sea"


def test_a_data_asset_is_read(azure_service: AzureService, azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    address = azurite.upload({"a.tar": b"0123456789"})
    container = address.removeprefix("az://").partition("/")[0]
    add_datastore(azure_service, "fast", datastoreType="AzureBlob", accountName=ACCOUNT, containerName=container)
    add_asset(azure_service, "1", f"{LONG}datastores/fast/paths/set/")

    async def use() -> None:
        storage = open_storage("azureml:imagenet:1", {**os.environ, **JOB, **azurite.environment})
        assert await storage.list() == {"a.tar": 10}
        assert bytes(await storage.read("a.tar", 3, 4)) == b"3456"

    asyncio.run(use())


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("azureml:imagenet:7", "data asset azureml:imagenet:7 cannot be had from the workspace workspace: .*data show"),
        ("azureml:none@latest", "data asset azureml:none@latest cannot be had"),
        ("azureml://datastores/none/paths/a", "datastore none cannot be had from the workspace workspace: .*not found"),
        ("azureml://datastores/files/paths/a", "kind AzureFileDatastore, and only Blob Storage and Data Lake Gen2"),
    ],
)
def test_what_is_not_there(azure_service: AzureService, address: str, message: str) -> None:
    add_datastore(azure_service, "files", datastoreType="AzureFile", accountName="x", fileShareName="share")
    with pytest.raises(StorageError, match=message) as raised:
        found(address)
    assert SUBSCRIPTION not in str(raised.value)


def test_no_workspace(azure_service: AzureService) -> None:
    with pytest.raises(StorageError, match=r"No workspace is known here.*config.json"):
        found("azureml:imagenet:1", {})
