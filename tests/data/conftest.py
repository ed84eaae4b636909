"""Small sets of real image files, and Blob Storage on this machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.data.azurite import Azurite, start_azurite
from tests.data.fault_proxy import FaultProxy
from tests.jobs.azure_service.fixture import azure_certificate, azure_service

__all__ = ["azure_certificate", "azure_service"]

WriteImages = Callable[[Path, int], Path]


@pytest.fixture
def write_images() -> WriteImages:
    """Write so many JPEG files into a class folder; the grey of each is 10 times its number."""

    def write(folder: Path, count: int) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = np.full((24, 30, 3), 10 * number, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number:03}.jpg", quality=95)
        return folder

    return write


@pytest.fixture
def meeting_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own where cache servers are met: a socket's path must be short."""
    folder = Path(tempfile.mkdtemp(prefix="nc", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    """One server for all tests of this process; each takes containers of its own."""
    yield from start_azurite()


@pytest.fixture
def fault_proxy(azurite: Azurite) -> Iterator[FaultProxy]:
    """What stands before that server."""
    with FaultProxy(azurite) as proxy:
        yield proxy
