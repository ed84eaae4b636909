"""Reads shards from Azure Blob Storage by the Rust client of obstore: which requests are tried again, how often, and
which error a user gets.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import override

from azureml_strategy.data.storage.addresses import BlobFolder, parse_address
from azureml_strategy.data.storage.assets import find_folder
from azureml_strategy.data.storage.credentials import Credential, IdentityCredential, find_credential
from azureml_strategy.data.storage.folder import Storage, StorageError
from azureml_strategy.lazy import install_line

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
    from obstore.store import AzureStore

log = logging.getLogger(__name__)

_STATUS = re.compile(r"non-2xx status code: (\d{3})[^:]*")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_OUR_PROVIDER = "External Azure credential provider"
BEHIND_END = "InvalidRange"  # the service's name for a part that begins behind the end of a blob
# Words of an error of Rust's network libraries, and what they mean. The first that occurs counts.
_NETWORK = {
    "ConnectionRefused": "the connection was refused",
    "ConnectionReset": "the connection was reset",
    "invalid peer certificate": "the certificate is not trusted",
    "TimedOut": "no answer came in time",
    "IncompleteBody": "the connection broke off within the answer",
    "IncompleteMessage": "the connection broke off before the answer",
    "UnexpectedEof": "the connection broke off",
    "tcp connect error": "no connection could be made",
}
_LOGGED_S = 8.0  # shorter pauses are not logged: one failed request among thousands is normal
_LOGGED_AGAIN_S = 60.0

# Larger reads are several requests at once: one connection does not fill a node's network, and one that breaks off
# costs 8 MiB. It is also the size of the blocks that azcopy reads.
_REQUEST_BYTES = 8 << 20
_AT_ONCE = 64  # requests under way, each a connection
_CONNECT = timedelta(seconds=10)
_REQUEST = timedelta(minutes=5)  # a slow connection is not a broken one: 8 MiB at 30 kB/s
_Result = TypeVar("_Result")


class Kind(Enum):
    """What may be done about a failed request."""

    AGAIN = auto()  # it may succeed later
    BUSY = auto()  # it may succeed later, if fewer requests are made
    UNKNOWN_HOST = auto()  # it may succeed later, if the host was reached before
    NO_IDENTITY = auto()  # it may succeed later, if there was a credential before
    EXPIRED = auto()  # a new token is tried once
    DENIED = auto()
    MISSING = auto()
    CHANGED = auto()
    REFUSED = auto()  # asking again would not help


# By the status of an answer.
_KINDS = {
    401: Kind.EXPIRED,
    403: Kind.DENIED,
    404: Kind.MISSING,
    408: Kind.AGAIN,
    412: Kind.CHANGED,
    429: Kind.BUSY,
    503: Kind.BUSY,
}


@dataclass(frozen=True)
class Fault:
    """A failed request."""

    kind: Kind
    reason: str  # for a message, without secrets: our own words, a status, and the service's name of the error
    code: str = ""  # the service's name of the error, such as `ContainerNotFound`; empty without an answer


class UnusableAnswerError(ValueError):
    """An answer came that cannot be what was asked for, such as one of another length."""


def explain(error: Exception) -> Fault:
    """Say what an error of obstore means. Its own text is not shown: it may contain a signature."""
    text = str(error)
    if isinstance(error, UnusableAnswerError):
        return Fault(Kind.AGAIN, text)
    if _OUR_PROVIDER in text:
        return Fault(Kind.NO_IDENTITY, "no credential could be had")
    if found := _STATUS.search(text):
        status = int(found[1])
        code = named[1] if (named := _CODE.search(text)) else ""
        kind = _KINDS.get(status, Kind.AGAIN if status >= 500 else Kind.REFUSED)
        return Fault(kind, f"the service answered {status}{f' {code}' if code else ''}", code)
    if "StartTooLarge" in text:  # obstore found it in an answer of another status
        return Fault(Kind.REFUSED, "the blob is shorter", BEHIND_END)
    if "dns error" in text:
        return Fault(Kind.UNKNOWN_HOST, "the name of its host is not known")
    reason = next((reason for word, reason in _NETWORK.items() if word in text), None)
    if reason is None and "Requested" in text:
        reason = "the answer was of another part of the blob"
    return Fault(Kind.AGAIN, reason or f"the request failed ({type(error).__name__})")


@dataclass(frozen=True)
class Patience:
    """How long reads go on in spite of failures; seconds.

    Attributes:
        total: after this long without success a read fails. Half of the ten minutes after which torch's collectives
            give up on a rank that does not come, so that the error is about the storage and not about the network.
        first_pause, longest_pause: between two tries. Pauses double.
        unknown: how long a host may be unknown that has never been reached: mistyped, more likely than out of order.
        silence: how long a connection may bring nothing before it counts as broken.
    """

    total: float = 300.0
    first_pause: float = 0.25
    longest_pause: float = 30.0
    unknown: float = 15.0
    silence: float = 30.0


class AzureStorage(Storage):
    """A folder in Blob Storage.

    The first read of a blob remembers its ETag, and a later one that finds another fails: parts of two versions must
    not be mixed.
    """

    def __init__(self, address: str, environ: Mapping[str, str], patience: Patience | None = None) -> None:
        try:
            import obstore  # noqa: F401
        except ImportError as error:
            raise StorageError(f"What reads Blob Storage is not installed. Type: {install_line('data')}") from error
        self._place = parse_address(address, environ)
        self.address = address
        self._environ = environ
        self._patience = patience or Patience()
        self._quiet_until = 0.0  # while the service is busy, all reads wait together
        self._logged_at = -_LOGGED_AGAIN_S
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._tags: dict[str, str | None] = {}

    @override
    async def list(self) -> dict[str, int]:
        return {name: blob["size"] for name, blob in (await self._blobs()).items()}

    @override
    async def versions(self) -> dict[str, str]:
        return {name: f"{blob['e_tag']} {blob['last_modified']}" for name, blob in (await self._blobs()).items()}

    @override
    async def place(self) -> str:
        folder = (await self._connect()).folder
        return f"{folder.endpoint} {folder}"

    async def _blobs(self) -> dict[str, ObjectMeta]:
        from obstore import list_with_delimiter_async

        found = await self._ask(self.address, lambda store: list_with_delimiter_async(store))
        names = {str(each["path"]).rpartition("/")[2]: each for each in found["objects"]}
        if not names:
            folder = (await self._connect()).folder
            raise StorageError(
                f"{self.address} holds no blobs: there are none in the folder {folder}. Check the path, with small and "
                "capital letters as they are in the portal."
            )
        return names

    @override
    async def read(self, name: str, start: int, length: int) -> bytes | memoryview:
        if length <= _REQUEST_BYTES:
            return await self._read_part(name, start, length) if length else b""
        content = bytearray(length)

        async def read_into(offset: int) -> None:
            size = min(_REQUEST_BYTES, length - offset)
            content[offset : offset + size] = await self._read_part(name, start + offset, size)

        try:
            async with asyncio.TaskGroup() as group:
                for offset in range(0, length, _REQUEST_BYTES):
                    group.create_task(read_into(offset))
        except* StorageError as failed:
            error = failed.exceptions[0]  # the others' would say the same
        else:
            return memoryview(content)
        raise error

    @override
    async def close(self) -> None:
        self._connection = None

    async def _read_part(self, name: str, start: int, length: int) -> memoryview:
        return await self._ask(
            f"{self.address.rstrip('/')}/{name}", lambda store: self._get(store, name, start, length)
        )

    async def _get(self, store: AzureStore, name: str, start: int, length: int) -> memoryview:
        """Make one request for a part of a blob, and check that the answer is what was asked for."""
        from obstore import get_async

        options: GetOptions = {"range": (start, start + length)}
        if known := self._tags.get(name):
            options["if_match"] = known
        answer = await get_async(store, name, options=options)
        tag = answer.meta["e_tag"]
        if tag != self._tags.setdefault(name, tag):
            raise StorageError(_changed(self.address, name))
        if answer.meta["size"] < start + length:
            raise StorageError(
                f"{self.address.rstrip('/')}/{name} ends after {answer.meta['size']:,} bytes; {length:,} from byte "
                f"{start:,} on were asked for. It is incomplete, or was changed: copy it again."
            )
        content = memoryview(await answer.bytes_async())
        if len(content) != length:
            raise UnusableAnswerError(f"{len(content):,} bytes came where {length:,} were asked for")
        return content

    async def _ask(self, what: str, request: Callable[[AzureStore], Awaitable[_Result]]) -> _Result:
        """Repeat a request for `what` until it succeeds, cannot succeed, or was tried for long enough.

        Raises:
            StorageError: it did not succeed.
        """
        from obstore.exceptions import BaseError

        began, tries, renewed = time.monotonic(), 0, False
        while True:
            connection = await self._connect()
            while (left := self._quiet_until - time.monotonic()) > 0:
                await asyncio.sleep(left)
            tries += 1
            try:
                async with self._slots:
                    result = await request(connection.store)
                connection.worked = True
                return result
            except StorageError:
                raise
            except (BaseError, OSError, ValueError) as error:
                fault = explain(error)
            # Not in the handler: an error raised there would refer to obstore's, which may contain a signature.
            if fault.kind is Kind.EXPIRED and not renewed and isinstance(connection.credential, IdentityCredential):
                renewed = True
                self._renew(connection, connection.credential)
            elif self._is_final(fault, connection, time.monotonic() - began):
                raise StorageError(_failed(what, fault, connection, tries))
            else:
                await self._pause(fault, tries, what)

    async def _pause(self, fault: Fault, tries: int, what: str) -> None:
        """Wait before `what` is asked for again, after so many tries."""
        longest = min(self._patience.first_pause * 2.0 ** min(tries - 1, 30), self._patience.longest_pause)
        pause = longest * random.uniform(0.5, 1.0)  # not all nodes at the same moment
        now = time.monotonic()
        if pause >= _LOGGED_S and now >= self._logged_at + _LOGGED_AGAIN_S:
            self._logged_at = now
            log.warning("%s: %s. It is tried again, for up to %.0f s.", what, fault.reason, self._patience.total)
        if fault.kind is Kind.BUSY:
            self._quiet_until = max(self._quiet_until, now + pause)
        await asyncio.sleep(pause)

    def _is_final(self, fault: Fault, connection: _Connection, waited: float) -> bool:
        patience = self._patience
        if fault.kind in (Kind.AGAIN, Kind.BUSY):
            return waited > patience.total
        if fault.kind is Kind.UNKNOWN_HOST:
            return waited > (patience.total if connection.worked else patience.unknown)
        return fault.kind is not Kind.NO_IDENTITY or not connection.worked or waited > patience.total

    def _renew(self, rejected: _Connection, identity: IdentityCredential) -> None:
        """Ask for a new token at the next request. Of all reads whose token was rejected, only the first does it."""
        if self._connection is rejected:
            identity.forget()
            self._connection = _Connection(rejected.folder, identity, self._patience)
            self._connection.worked = rejected.worked

    async def _connect(self) -> _Connection:
        """Find the folder of the address, in its workspace if need be, and a credential for it; once."""
        async with self._connecting:
            if self._connection is None:
                folder = await asyncio.to_thread(find_folder, self._place, self._environ)
                credential = find_credential(folder.account, self._environ)
                self._connection = _Connection(folder, credential, self._patience)
            return self._connection


class _Connection:
    """obstore's client of a folder, and whether it has ever had an answer."""

    def __init__(self, folder: BlobFolder, credential: Credential, patience: Patience) -> None:
        from obstore.store import AzureStore

        self.folder, self.credential, self.worked = folder, credential, False
        self.store = AzureStore(
            folder.container,
            prefix=folder.path or None,
            # All that obstore would otherwise take from the environment.
            config={
                "account_name": folder.account,
                "endpoint": folder.endpoint,
                "use_emulator": False,
                "skip_signature": False,
            },
            credential_provider=credential,
            client_options={
                "allow_http": folder.endpoint.startswith("http:"),
                "connect_timeout": _CONNECT,
                "read_timeout": timedelta(seconds=patience.silence),
                "timeout": _REQUEST,
            },
            retry_config={"max_retries": 0},
        )


def _failed(what: str, fault: Fault, connection: _Connection, tries: int) -> str:
    account, credential = connection.folder.account, connection.credential
    match fault.kind:
        case Kind.DENIED | Kind.EXPIRED if isinstance(credential, IdentityCredential):
            return (
                f"{what} may not be read: {fault.reason}. It was asked for with {credential.name}. Give it the role "
                f"Storage Blob Data Reader on the storage account {account} (az role assignment create --role 'Storage "
                "Blob Data Reader' --assignee IDENTITY --scope ACCOUNT_ID; it takes some minutes to count), and see "
                "that the account's firewall lets this network in."
            )
        case Kind.DENIED | Kind.EXPIRED:
            return (
                f"{what} may not be read: {fault.reason}. It was asked for with {credential.name}, which is not the "
                f"storage account {account}'s, has expired, or does not allow to read and list. Set it anew, or unset "
                "it: then the job's identity is used."
            )
        case Kind.NO_IDENTITY:
            return (
                f"{what} cannot be read: {credential.problem or fault.reason} Give the cluster an identity "
                "(azureml-strategy cluster create --identity), run `az login`, or set AZURE_STORAGE_ACCOUNT_KEY or "
                "AZURE_STORAGE_SAS_TOKEN."
            )
        case Kind.MISSING if fault.code in ("ContainerNotFound", "FilesystemNotFound"):
            return (
                f"{what}: the storage account {account} has no container {connection.folder.container}. Check how it "
                f"is spelt: az storage container list --account-name {account} --auth-mode login -o table"
            )
        case Kind.MISSING:
            return f"There is no blob {what} ({fault.reason}). Copy it there again, or correct the address."
        case Kind.REFUSED if fault.code == BEHIND_END:
            return f"{what} ends before the part that was asked for. It is incomplete, or was changed: copy it again."
        case Kind.CHANGED:
            return _changed(*what.rsplit("/", 1))
        case Kind.UNKNOWN_HOST:
            return (
                f"{what} cannot be read: {fault.reason}. Check the name of the storage account, {account}, and that "
                "this node may resolve it (a private endpoint needs its DNS zone)."
            )
    times = "once" if tries == 1 else f"{tries} times"
    return f"{what} cannot be read, after it was tried {times}: {fault.reason}. Check the storage account {account}."


def _changed(address: str, name: str) -> str:
    return (
        f"{address.rstrip('/')}/{name} was changed while it was read: its ETag is not the one that it had first. Write "
        "a new version of a data set to a folder of its own, and start this run again."
    )
