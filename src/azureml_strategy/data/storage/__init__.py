"""Where the shards of a packed set lie: a folder of this node, a mount, or Azure Blob Storage."""

from __future__ import annotations

import re
from collections.abc import Mapping

from azureml_strategy.data.storage.folder import (
    OF_ONE_FILE,
    FolderStorage,
    Storage,
    StorageError,
    own_fault,
    storage_error,
)

__all__ = [
    "OF_ONE_FILE",
    "FolderStorage",
    "Storage",
    "StorageError",
    "is_remote",
    "open_storage",
    "own_fault",
    "storage_error",
]

_REMOTE = re.compile(r"(?:az|azure|abfss?|wasbs?|https?)://|azureml:", re.IGNORECASE)


def is_remote(address: str) -> bool:
    """Whether an address names Blob Storage or an Azure ML data asset, and not a folder of this node."""
    return _REMOTE.match(address) is not None


def open_storage(address: str, environ: Mapping[str, str]) -> Storage:
    """Open a folder of shards. Nothing of Azure is asked before the first `list` or `read`.

    Args:
        address: a folder; or `az://CONTAINER/PATH`, `https://ACCOUNT.blob.core.windows.net/CONTAINER/PATH`,
            `abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH`, `azureml://datastores/NAME/paths/PATH`, or a data
            asset `azureml:NAME:VERSION`.
        environ: environment variables, for the account, its credentials and the workspace.

    Raises:
        StorageError: the address is not one of these, has a signature in it, or what reads it is not installed.
    """
    if not is_remote(address):
        return FolderStorage(address)
    from azureml_strategy.data.storage.azure import AzureStorage

    return AzureStorage(address, environ)
