"""With what credential Blob Storage is read: a key or a signature from the environment, or else the job's identity."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from typing_extensions import override

from azureml_strategy.cluster.environ import copied
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.data.storage.addresses import EMULATOR_ACCOUNT, uses_emulator
from azureml_strategy.data.storage.folder import StorageError
from azureml_strategy.lazy import install_line

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential
    from obstore.store import AzureCredential

# What this package reads, azure-identity (`EnvironmentVariables` of azure.identity._constants), and azure-ai-ml's own
# credential for the user of a job.
_READ = re.compile(r"(?:AZURE|AZUREML|MSI|IDENTITY|OBO|DEFAULT_IDENTITY)_\w+|IMDS_ENDPOINT|OID|TID")
_lending = threading.Lock()
_SCOPE = "https://storage.azure.com/.default"
# Printed in the documentation of Azurite; every emulator has it.
_EMULATOR_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_KEY, _SAS, _CONNECTION = "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CONNECTION_STRING"


class Variables(dict[str, str]):
    """Environment variables by name. Its text, as in a traceback with local variables, shows no value."""

    @override
    def __repr__(self) -> str:
        return f"<{len(self)} environment variables>"

    __str__ = __repr__

    @property
    def mark(self) -> str:
        """A hash of all names and values. It is kept in memory only."""
        return hashlib.sha256(json.dumps(sorted(self.items())).encode()).hexdigest()


def storage_variables(environ: Mapping[str, str]) -> Variables:
    """Return those environment variables that storage reads."""
    return Variables({name: value for name, value in copied(environ).items() if _READ.fullmatch(name)})


class Credential(ABC):
    """What signs the requests to an account. obstore calls it first, and again before the last answer expires.

    Attributes:
        name: for messages; never the secret.
        problem: a sentence that says why the last call has failed; None if it has not.
    """

    name: str
    problem: str | None = None

    @abstractmethod
    async def __call__(self) -> AzureCredential:
        """Return a key, a signature or a token."""


class FixedCredential(Credential):
    """An account key or a shared access signature, which somebody has set."""

    def __init__(self, name: str, given: AzureCredential) -> None:
        self.name = name
        self._given = given

    @override
    async def __call__(self) -> AzureCredential:
        return self._given


class IdentityCredential(Credential):
    """Tokens of Entra ID, for the identity of the job or of the user."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._identity: TokenCredential | None = None
        self.name = "the user's identity" if _on_behalf(environ) else "the identity that azure-identity found"

    @override
    async def __call__(self) -> AzureCredential:
        return await asyncio.to_thread(self._fetch)

    def forget(self) -> None:
        """Make the next call ask for a new token: the service has rejected the last one."""
        self._identity = None  # which keeps the token

    def _fetch(self) -> AzureCredential:
        from azure.core.exceptions import AzureError

        try:
            with lent_variables(self._environ):
                identity = self._identity = self._identity or find_identity(self._environ)
                token = identity.get_token(_SCOPE)
        except (AzureError, StorageError) as error:
            self.problem = redact_text(str(error), self._environ).strip().splitlines()[0]
            raise
        self.problem = None
        return {"token": token.token, "expires_at": datetime.fromtimestamp(token.expires_on, UTC)}


@contextmanager
def lent_variables(environ: Mapping[str, str]) -> Iterator[None]:
    """Show the Azure libraries the variables of the job that storage is read for, not those of this process.

    Only Python's view of the environment changes: threads of other libraries may read the environment itself at any
    time. One thread at a time does this; the others wait.
    """
    with _lending:
        own = os.environ
        kept = {name: value for name, value in own.items() if name not in storage_variables(own)}
        os.environ = {**kept, **storage_variables(environ)}  # type: ignore[assignment]  # noqa: B003
        try:
            yield
        finally:
            os.environ = own  # noqa: B003


def find_identity(environ: Mapping[str, str]) -> TokenCredential:
    """Find the identity that this process has in Azure. Nothing is asked yet.

    It is the user's in a job that runs with its user's identity. Otherwise azure-identity looks for one: a service
    principal from the variables of `lent_variables`, the managed identity of the cluster, the az command.

    Raises:
        StorageError: a library is not installed.
    """
    logging.getLogger("azure.identity").setLevel(logging.CRITICAL)  # our own error says what has failed
    if _on_behalf(environ):
        try:
            from azure.ai.ml.identity import AzureMLOnBehalfOfCredential
        except ImportError as error:
            raise StorageError(
                "This job runs with its user's identity, and what asks for it is not installed. Type: "
                f"{install_line('azure')}"
            ) from error
        return AzureMLOnBehalfOfCredential()
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError as error:
        raise StorageError(f"What signs in to Azure is not installed. Type: {install_line('data')}") from error
    # Azure ML names the cluster's identity by the first; azure-identity reads the second by itself.
    client = environ.get("DEFAULT_IDENTITY_CLIENT_ID") or environ.get("AZURE_CLIENT_ID")
    return DefaultAzureCredential(managed_identity_client_id=client)


def find_credential(account: str, environ: Mapping[str, str]) -> Credential:
    """Choose what reads an account: its key, a signature, a connection string, or else an identity.

    A key or signature is not used if the environment says that it is another account's: this account would refuse it.
    """
    owner = environ.get("AZURE_STORAGE_ACCOUNT_NAME") or environ.get("AZURE_STORAGE_ACCOUNT") or account
    if owner == account and environ.get(_KEY):
        return _key(_KEY, environ[_KEY])
    if owner == account and environ.get(_SAS):
        return _signature(_SAS, environ[_SAS])
    parts = dict(re.findall(r"([A-Za-z]+)=([^;]*)", environ.get(_CONNECTION, "")))
    if parts.get("AccountName", account) == account:
        if parts.get("AccountKey"):
            return _key(_CONNECTION, parts["AccountKey"])
        if parts.get("SharedAccessSignature"):
            return _signature(_CONNECTION, parts["SharedAccessSignature"])
    if account == EMULATOR_ACCOUNT and uses_emulator(environ):
        return _key("the emulator's key", _EMULATOR_KEY)
    return IdentityCredential(environ)


def _key(name: str, key: str) -> Credential:
    return FixedCredential(name, {"access_key": key.strip(), "expires_at": None})


def _signature(name: str, signature: str) -> Credential:
    return FixedCredential(name, {"sas_token": signature.strip().lstrip("?"), "expires_at": None})


def _on_behalf(environ: Mapping[str, str]) -> bool:
    """Whether Azure ML gives the job its user's tokens: the variables that AzureMLOnBehalfOfCredential reads."""
    return bool(environ.get("OBO_ENDPOINT")) or environ.get("AZUREML_DATAPREP_TOKEN_PROVIDER") == "sparkobo"
