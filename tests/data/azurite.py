"""Azurite, Microsoft's Blob server, on a free port of this machine; `make test` installs it where npm is."""

from __future__ import annotations

import itertools
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from azure.storage.blob import BlobServiceClient

ACCOUNT = "devstoreaccount1"
# In Azurite's documentation.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_OPTIONS = ("--silent", "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--loose")
# A busy machine takes seconds to start node; this only bounds a start that will never succeed.
_START_S = 60


@dataclass
class Azurite:
    """A running server.

    Attributes:
        port: where it listens.
        environment: variables with which `open_storage("az://...", environment)` reads it.
        client: of azure-storage-blob, which survives a fork, as obstore does not.
    """

    port: int
    environment: dict[str, str] = field(init=False)
    client: BlobServiceClient = field(init=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        from azure.storage.blob import BlobServiceClient

        endpoint = f"http://127.0.0.1:{self.port}/{ACCOUNT}"
        self.environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": endpoint,
        }
        self.client = BlobServiceClient(endpoint, credential=KEY)

    def upload(self, content: Path | Mapping[str, bytes], prefix: str = "set", container: str | None = None) -> str:
        """Put files into a new container, and return their address: `az://container-3/set`.

        Args:
            content: a folder with all that is below it; or contents by name.
            prefix: the folder in the container.
            container: a name that is not taken; one of a number by default.
        """
        made = self.client.create_container(container or f"container-{next(self._numbers)}")
        if isinstance(content, Path):
            files = (path for path in sorted(content.rglob("*")) if path.is_file())
            content = {path.relative_to(content).as_posix(): path.read_bytes() for path in files}
        for name, data in content.items():
            made.upload_blob(f"{prefix}/{name}".lstrip("/"), data)
        return f"az://{made.container_name}/{prefix}".rstrip("/")

    def signature(self) -> str:
        """A shared access signature that allows to read and list everything for an hour."""
        from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

        return generate_account_sas(
            ACCOUNT,
            KEY,
            ResourceTypes(container=True, object=True),
            AccountSasPermissions(read=True, list=True),
            datetime.now(UTC) + timedelta(hours=1),
        )

    def replace(self, address: str, content: bytes) -> None:
        """Write a blob anew; the address is `az://CONTAINER/PATH`."""
        container, _, name = address.removeprefix("az://").partition("/")
        self.client.get_blob_client(container, name).upload_blob(content, overwrite=True)


def start_azurite() -> Iterator[Azurite]:
    """Start a server, and end it; a fixture's body.

    It skips the test where Azurite is not installed.
    """
    installed = Path(sys.prefix, "azurite", "node_modules", ".bin", "azurite-blob")
    program = str(installed) if installed.exists() else shutil.which("azurite-blob")
    if program is None or shutil.which("node") is None:
        pytest.skip("Azurite is not installed: it needs npm, and then `make .venv-test/azurite/installed`")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([program, *_OPTIONS, "--blobPort", str(port)], stdout=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield Azurite(port)
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + _START_S
    while time.monotonic() < limit and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"Azurite did not start; it ended with {process.poll()}")
