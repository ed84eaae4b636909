"""A folder of shards, wherever it is: what every storage can do, its errors, and the folder of a node or a mount."""

from __future__ import annotations

import asyncio
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from azureml_strategy.files import read_range

# A read of a mount waits for the network. This many wait at once, as blobfuse itself does with its own requests.
_THREADS = 32
# Errors that one file of a folder can have by itself: it is gone, forbidden, a folder, or a link to nowhere. All others
# are the fault of the disk, the mount, the network, or this process.
OF_ONE_FILE = frozenset((errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP))

_Result = TypeVar("_Result")


class StorageError(OSError):
    """Shards cannot be read from where they lie. The message says what was seen and what to type; it has no secret."""


def own_fault(error: OSError, folder: str | os.PathLike[str]) -> bool:
    """Whether an error is of one file alone, and not of its folder: if a mount is gone, all of its files fail."""
    if error.errno not in OF_ONE_FILE:
        return False
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None  # without its mount, the folder is empty
    except OSError:
        return False


def storage_error(what: str, error: OSError) -> StorageError:
    """Return the error that the storage did not return a file."""
    if isinstance(error, StorageError):
        return error
    raised = StorageError(
        f"{what} cannot be read ({_reason(error)}). That is no damage of the data, so nothing was left out or "
        "replaced: see that its disk or mount is there and may be read, and resume."
    )
    raised.__cause__ = error
    return raised


class OpenFile:
    """A file that is closed when nobody uses it any more: one thread may read it while another one drops it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class Storage(ABC):
    """A folder of shards, wherever it is. It is used in the one process, and by the one event loop, that made it.

    Attributes:
        address: the folder as the user gave it. It contains no secret: an address that has one is refused.
    """

    address: str

    @abstractmethod
    async def list(self) -> dict[str, int]:
        """Return the names of the files directly below the folder, and the bytes of each.

        Raises:
            StorageError: there is no such folder, it is empty, or it may not be read.
        """

    @abstractmethod
    async def versions(self) -> dict[str, str]:
        """Return what tells one version of each file directly below the folder from another, by one request.

        Raises:
            StorageError: as of `list`.
        """

    @abstractmethod
    async def place(self) -> str:
        """Return what the address leads to, which depends on environment variables and may change later.

        Raises:
            StorageError: it is a data asset or a datastore that cannot be found.
        """

    @abstractmethod
    async def read(self, name: str, start: int, length: int) -> bytes | memoryview:
        """Read exactly `length` bytes of a file from byte `start` on. Many reads may be under way at once.

        Raises:
            StorageError: the part cannot be read, also after retries; or the file has changed since its first read.
        """

    @abstractmethod
    async def close(self) -> None:
        """Free what the storage holds. No read is under way any more."""


class FolderStorage(Storage):
    """A folder of this node, or one that is mounted here."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._folder = Path(address).expanduser()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="shards")

    @override
    async def list(self) -> dict[str, int]:
        return {name: status.st_size for name, status in (await self._in_thread(self._list)).items()}

    @override
    async def versions(self) -> dict[str, str]:
        found = await self._in_thread(self._list)
        return {name: f"{status.st_mtime_ns} {status.st_size}" for name, status in found.items()}

    @override
    async def place(self) -> str:
        return str(self._folder.resolve())

    @override
    async def read(self, name: str, start: int, length: int) -> bytes:
        return await self._in_thread(self._read, name, start, length)

    @override
    async def close(self) -> None:
        self._threads.shutdown(wait=False)  # a mount that hangs would hang this too

    async def _in_thread(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _list(self) -> dict[str, os.stat_result]:
        try:
            with os.scandir(self._folder) as entries:
                found = {entry.name: entry.stat() for entry in entries if entry.is_file()}
        except OSError as error:
            raise StorageError(
                f"{self._folder} cannot be listed: {_reason(error)}. Name the folder of the shards."
            ) from error
        if not found:
            raise StorageError(f"{self._folder} holds no files. Name the folder that the shards lie in.")
        return found

    def _read(self, name: str, start: int, length: int) -> bytes:
        path = self._folder / name
        try:
            with path.open("rb", buffering=0) as file:
                content = read_range(file.fileno(), length, start)
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {_reason(error)}.") from error
        if len(content) < length:
            raise StorageError(
                f"{path} ends after {start + len(content):,} bytes; {length:,} from byte {start:,} on were asked for. "
                "It is incomplete, or was changed: copy it again."
            )
        return content


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
