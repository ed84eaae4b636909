"""What networks and busy services do to a read: it is made again, or fails with the reason; never with other bytes."""

from __future__ import annotations

import asyncio
import math
import os
import random
import threading
from collections.abc import Callable

import pytest
from tests.data.azurite import Azurite
from tests.data.fault_proxy import Answer, FaultProxy
from tests.jobs.azure_service import AzureService, Reply, Request, login

from azureml_strategy.data.storage import StorageError
from azureml_strategy.data.storage.azure import AzureStorage, Kind, Patience, explain

CONTENT = random.Random(5).randbytes(1_000_000)
STEP = 100_000
# The pauses of a test; a read that must fail gives up at once.
QUICK = Patience(first_pause=0.01, longest_pause=0.05)
AT_ONCE = Patience(total=0.0, first_pause=0.01, unknown=0.0)


def read_all(address: str, environ: dict[str, str], patience: Patience = QUICK) -> bytes:
    """Read a blob in ten parts at once."""

    async def run() -> bytes:
        storage = AzureStorage(address, environ, patience)
        starts = range(0, len(CONTENT), STEP)
        parts = await asyncio.gather(*(storage.read("a.tar", start, STEP) for start in starts))
        await storage.close()
        return b"".join(parts)

    return asyncio.run(run())


FAULTS: dict[str, Callable[[FaultProxy], None]] = {
    "503": lambda proxy: proxy.fail(503, "ServerBusy", times=12),
    "503 that names a pause": lambda proxy: proxy.fail(503, "ServerBusy", times=3, retry_after="1"),
    "429 that names a pause": lambda proxy: proxy.fail(429, "TooManyRequests", times=3, retry_after="1"),
    "500": lambda proxy: proxy.fail(500, "InternalError", times=5),
    "no answer": lambda proxy: proxy.drop(-1, times=5),
    "broken off": lambda proxy: proxy.drop(STEP // 2, times=5),
    "broken off at once": lambda proxy: proxy.drop(0, times=5),
    "one byte short": lambda proxy: proxy.resize(-1, times=5),
    "longer": lambda proxy: proxy.resize(10, times=5),
    "empty": lambda proxy: proxy.resize(-STEP, times=5),
    "another part": lambda proxy: proxy.change(of_another_part, times=3),
}


def of_another_part(answer: Answer) -> Answer:
    headers = answer.headers | {"Content-Range": f"bytes 7-{6 + STEP}/{len(CONTENT)}"}
    return Answer(answer.status, headers, answer.body)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_passes_is_read_again(azurite: Azurite, fault_proxy: FaultProxy, fault: str) -> None:
    address = azurite.upload({"a.tar": CONTENT})
    FAULTS[fault](fault_proxy)
    assert read_all(address, fault_proxy.environment) == CONTENT
    assert len(fault_proxy.seen) > 10


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda proxy: proxy.fail(503, "ServerBusy", times=math.inf), "the service answered 503 ServerBusy"),
        (lambda proxy: proxy.fail(500, "InternalError", times=math.inf), "the service answered 500 InternalError"),
        (lambda proxy: proxy.drop(50, times=math.inf), "the connection broke off within the answer"),
        (lambda proxy: proxy.drop(-1, times=math.inf), "the connection broke off before the answer"),
        (lambda proxy: proxy.resize(-1, times=math.inf), "99,999 bytes came where 100,000 were asked for"),
        (lambda proxy: proxy.resize(1, times=math.inf), "100,001 bytes came where 100,000 were asked for"),
        (lambda proxy: proxy.change(of_another_part, times=math.inf), "the answer was of another part of the blob"),
        (lambda proxy: proxy.fail(403, "AuthorizationPermissionMismatch"), "403 AuthorizationPermissionMismatch"),
        (lambda proxy: proxy.fail(400, "InvalidHeaderValue"), "the service answered 400 InvalidHeaderValue"),
    ],
)
def test_what_does_not_pass_is_named(
    azurite: Azurite, fault_proxy: FaultProxy, fault: Callable[[FaultProxy], None], reason: str
) -> None:
    address = azurite.upload({"a.tar": CONTENT})
    fault(fault_proxy)
    with pytest.raises(StorageError, match=reason) as raised:
        read_all(address, fault_proxy.environment, AT_ONCE)
    assert f"{address}/a.tar" in str(raised.value)
    assert "SECRET" not in str(raised.value)
    assert raised.value.__context__ is None


def test_refused_connections_for_a_while(azurite: Azurite, fault_proxy: FaultProxy) -> None:
    address = azurite.upload({"a.tar": CONTENT})
    with fault_proxy.refusing():
        with pytest.raises(StorageError, match=r"the connection was refused. Check the storage account"):
            read_all(address, fault_proxy.environment, AT_ONCE)
        reader = threading.Thread(target=lambda: got.append(read_all(address, fault_proxy.environment)))
        got: list[bytes] = []
        reader.start()
    reader.join()
    assert got == [CONTENT]


def test_a_connection_that_falls_silent(azurite: Azurite, fault_proxy: FaultProxy) -> None:
    address = azurite.upload({"a.tar": CONTENT})
    over = threading.Event()

    def silent(answer: Answer) -> Answer:
        over.wait()
        return answer

    fault_proxy.change(silent, times=2)
    try:
        patience = Patience(first_pause=0.01, longest_pause=0.05, silence=0.5)
        assert read_all(address, fault_proxy.environment, patience) == CONTENT
    finally:
        over.set()


def test_a_changed_blob_that_a_server_does_not_notice(azurite: Azurite, fault_proxy: FaultProxy) -> None:
    """A proxy on the way may not look at the condition of a request: the ETag of the answer counts as well."""
    address = azurite.upload({"a.tar": CONTENT})

    def changed(answer: Answer) -> Answer:
        return Answer(answer.status, answer.headers | {"Etag": '"another"'}, bytes(len(answer.body)))

    fault_proxy.change(changed, passes=4)
    with pytest.raises(StorageError, match=r"a.tar was changed while it was read: its ETag"):
        read_all(address, fault_proxy.environment)


def test_a_list_is_made_again_too(azurite: Azurite, fault_proxy: FaultProxy) -> None:
    address = azurite.upload({"a.tar": b"12345"})
    fault_proxy.fail(503, "ServerBusy", times=2)
    fault_proxy.drop(20)
    assert asyncio.run(AzureStorage(address, fault_proxy.environment, QUICK).list()) == {"a.tar": 5}


def test_reads_wait_together_while_the_service_is_busy(azurite: Azurite, fault_proxy: FaultProxy) -> None:
    address = azurite.upload({"a.tar": CONTENT})
    fault_proxy.fail(503, "ServerBusy")

    async def run() -> None:
        storage = AzureStorage(address, fault_proxy.environment, Patience(first_pause=1.0))
        refused = asyncio.create_task(storage.read("a.tar", 0, 10))
        while not storage._quiet_until:
            await asyncio.sleep(0.01)
        await storage.read("a.tar", STEP, 10)  # which has not been refused itself
        await refused
        await storage.close()

    asyncio.run(run())
    first, *others = [each.at for each in fault_proxy.seen]
    assert len(others) == 2
    assert min(others) - first > 0.4


@pytest.fixture
def signed_in(azure_service: AzureService, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables with which a service principal's token reads through the proxy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    environ = {**os.environ, **fault_proxy.environment}
    return {key: value for key, value in environ.items() if key != "AZURE_STORAGE_ACCOUNT_KEY"}


def test_a_rejected_token_is_renewed(
    azurite: Azurite, fault_proxy: FaultProxy, signed_in: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = azurite.upload({"a.tar": CONTENT})

    def expired(answer: Answer) -> Answer:
        monkeypatch.setattr(login, "TOKEN", "the-second-token")
        return Answer(401, {}, b"<Error><Code>InvalidAuthenticationInfo</Code></Error>")

    fault_proxy.change(expired, times=5)
    assert read_all(address, signed_in) == CONTENT
    tokens = [each.headers["authorization"] for each in fault_proxy.seen]
    assert tokens[0] == f"Bearer {'the-token-of-the-principal'}"
    assert tokens[-1] == "Bearer the-second-token"
    assert len(tokens) == 15


def test_a_token_is_renewed_before_it_expires(
    azurite: Azurite, fault_proxy: FaultProxy, signed_in: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = azurite.upload({"a.tar": CONTENT})
    of_an_hour = login.answer

    def of_a_minute(request: Request) -> Reply:
        reply = of_an_hour(request)
        if isinstance(reply.content, dict) and "expires_in" in reply.content:
            reply.content["expires_in"] = 60
        return reply

    async def read() -> None:
        storage = AzureStorage(address, signed_in, QUICK)
        await storage.read("a.tar", 0, 10)
        monkeypatch.setattr(login, "TOKEN", "the-second-token")
        while fault_proxy.seen[-1].headers["authorization"] != "Bearer the-second-token":
            assert bytes(await storage.read("a.tar", 5, 10)) == CONTENT[5:15]

    monkeypatch.setattr(login, "answer", of_a_minute)
    asyncio.run(read())


@pytest.mark.parametrize(("status", "code"), [(401, "InvalidAuthenticationInfo"), (403, "AuthorizationFailure")])
def test_an_identity_that_may_not_read(
    azurite: Azurite, fault_proxy: FaultProxy, signed_in: dict[str, str], status: int, code: str
) -> None:
    address = azurite.upload({"a.tar": CONTENT})
    fault_proxy.fail(status, code, times=math.inf)
    with pytest.raises(
        StorageError, match="Give it the role Storage Blob Data Reader on the storage account dev"
    ) as raised:
        read_all(address, signed_in)
    assert f"{status} {code}" in str(raised.value)
    assert login.TOKEN not in str(raised.value)


def test_nobody_signed_in(azurite: Azurite, fault_proxy: FaultProxy, signed_in: dict[str, str]) -> None:
    signed_in["AZURE_CLIENT_SECRET"] = "a-wrong-secret"
    with pytest.raises(StorageError, match=r"cannot be read: .*or set AZURE_STORAGE_ACCOUNT_KEY") as raised:
        read_all(azurite.upload({"a.tar": CONTENT}), signed_in)
    assert "a-wrong-secret" not in str(raised.value)


def test_an_account_that_is_not_known() -> None:
    """As obstore 0.12 words it; to look up a name would leave this machine."""
    error = OSError('Generic MicrosoftAzure error ... ConnectError("dns error", Custom { ... })')
    assert explain(error).kind is Kind.UNKNOWN_HOST
