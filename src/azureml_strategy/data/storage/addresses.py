"""The addresses of data in Azure, and what each of them names."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from azureml_strategy.data.storage.folder import StorageError

_FORMS = (
    "az://CONTAINER/PATH, https://ACCOUNT.blob.core.windows.net/CONTAINER/PATH, "
    "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH, azureml://datastores/NAME/paths/PATH or azureml:NAME:VERSION"
)
_ACCOUNT, _CONTAINER = r"(?P<account>[a-z0-9]{3,24})", r"(?P<container>\$?[a-z0-9][a-z0-9-]{2,62})"
# Azure's public cloud is core.windows.net. The clouds of China and of the US government end in other names.
_HOST = rf"{_ACCOUNT}\.(?:blob|dfs)\.(?P<suffix>[a-z0-9.-]+)"
_PATH = r"(?:/(?P<path>.*))?"
_URL = re.compile(rf"https://{_HOST}/{_CONTAINER}{_PATH}", re.IGNORECASE)
_AT_HOST = re.compile(rf"(?:abfss?|wasbs?)://{_CONTAINER}@{_HOST}{_PATH}", re.IGNORECASE)
_IN_ACCOUNT = re.compile(rf"(?:az|azure|abfss?)://{_CONTAINER}{_PATH}", re.IGNORECASE)
_DATASTORE = re.compile(
    r"azureml://(?:subscriptions/(?P<subscription>[^/]+)/resource_?groups/(?P<group>[^/]+)"
    r"(?:/providers/Microsoft\.MachineLearningServices)?/workspaces/(?P<workspace>[^/]+)/)?"
    r"datastores/(?P<datastore>[^/]+)(?:/paths(?:/(?P<path>.*))?)?",
    re.IGNORECASE,
)
_ASSET = re.compile(rf"azureml:(?P<name>[\w.-]+)(?::(?P<version>[\w.-]+)|@latest){_PATH}")

_PUBLIC_CLOUD = "core.windows.net"
# What Azurite and Microsoft's own emulator listen for, and the account that both have. Its key is no secret: it is
# printed in the documentation, "Use the Azurite emulator for local Azure Storage development".
_EMULATOR = "http://127.0.0.1:10000"
EMULATOR_ACCOUNT = "devstoreaccount1"


@dataclass(frozen=True)
class BlobFolder:
    """A folder in a container."""

    account: str
    container: str
    path: str  # without slashes at its ends; empty for the whole container
    endpoint: str  # URL of the account's Blob service

    def __str__(self) -> str:
        return f"{self.path or '/'} in the container {self.container} of the storage account {self.account}"


@dataclass(frozen=True)
class DatastoreFolder:
    """A folder in a datastore of a workspace."""

    datastore: str
    path: str  # without slashes at its ends
    workspace: tuple[str, str, str] | None  # subscription, resource group and name; None for the job's own


@dataclass(frozen=True)
class DataAsset:
    """A folder in a data asset of the job's workspace."""

    name: str
    version: str | None  # None for the newest
    path: str = ""  # without slashes at its ends


def parse_address(address: str, environ: Mapping[str, str]) -> BlobFolder | DatastoreFolder | DataAsset:
    """Read an address. The environment gives the account of an address that has none, and another endpoint.

    Raises:
        StorageError: it is none of the known forms, or holds a signature. The message does not repeat the signature.
    """
    _refuse_query(address)
    if asset := _ASSET.fullmatch(address):
        return DataAsset(asset["name"], asset["version"], (asset["path"] or "").strip("/"))
    if store := _DATASTORE.fullmatch(address):
        workspace = (store["subscription"], store["group"], store["workspace"]) if store["workspace"] else None
        return DatastoreFolder(store["datastore"], (store["path"] or "").strip("/"), workspace)
    if url := _URL.fullmatch(address):
        return make_folder(url["account"], url["container"], unquote(url["path"] or ""), environ, url["suffix"])
    if found := _AT_HOST.fullmatch(address):
        return make_folder(found["account"], found["container"], found["path"] or "", environ, found["suffix"])
    if found := _IN_ACCOUNT.fullmatch(address):
        return make_folder(_account(address, environ), found["container"], found["path"] or "", environ)
    raise StorageError(
        f"{address} is no address of data in Azure. Write one of {_FORMS}. A container's name has 3 to 63 small "
        "letters, digits and dashes."
    )


def make_folder(
    account: str, container: str, path: str, environ: Mapping[str, str], suffix: str = _PUBLIC_CLOUD
) -> BlobFolder:
    """Describe a folder whose account is known; an emulator in the environment stands for every account.

    Raises:
        StorageError: AZURE_STORAGE_ENDPOINT would send data over the network without encryption.
    """
    return BlobFolder(account, container, path.strip("/"), _endpoint(environ) or f"https://{account}.blob.{suffix}")


def uses_emulator(environ: Mapping[str, str]) -> bool:
    """Whether AZURE_STORAGE_USE_EMULATOR says so, as the Azure tools read it."""
    return environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true", "yes")


def _refuse_query(address: str) -> None:
    parts = urlsplit(address)
    if not parts.query:
        return
    shown = address.partition("?")[0]
    if re.search(r"(?:^|&)sig=", parts.query, re.IGNORECASE):
        raise StorageError(
            f"{shown} was given with a shared access signature behind it. That is a secret, and an address is logged. "
            "Type the address up to the question mark, and set the rest as the variable AZURE_STORAGE_SAS_TOKEN."
        )
    raise StorageError(
        f"{shown} was given with a query behind it, which no folder has. Type it up to the question mark."
    )


def _account(address: str, environ: Mapping[str, str]) -> str:
    names = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
    found = next((environ[name] for name in names if environ.get(name)), None)
    if found is None and uses_emulator(environ):
        return EMULATOR_ACCOUNT
    if found is None:
        raise StorageError(
            f"{address} does not name a storage account. Set the variable AZURE_STORAGE_ACCOUNT_NAME, or type "
            f"https://ACCOUNT.blob.{_PUBLIC_CLOUD}/{address.split('://', 1)[1]}"
        )
    return found


def _endpoint(environ: Mapping[str, str]) -> str | None:
    endpoint = environ.get("AZURE_STORAGE_ENDPOINT", "").rstrip("/")
    if not endpoint:
        return f"{_EMULATOR}/{EMULATOR_ACCOUNT}" if uses_emulator(environ) else None
    parts = urlsplit(endpoint)
    if parts.scheme == "https" or uses_emulator(environ) or (parts.scheme == "http" and _is_loopback(parts.hostname)):
        return endpoint
    raise StorageError(
        f"AZURE_STORAGE_ENDPOINT is {endpoint.partition('?')[0]}. Without https, keys and data would cross the network "
        "unencrypted. Type https://..., or set AZURE_STORAGE_USE_EMULATOR=1 if it is an emulator."
    )


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
