"""Reads of Blob Storage: the same bytes as were put there, and a sentence where they cannot be had."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.data.azurite import ACCOUNT, Azurite
from tests.data.fault_proxy import FaultProxy

from azureml_strategy.data.storage import StorageError, open_storage
from azureml_strategy.data.storage.azure import AzureStorage

CONTENT = random.Random(7).randbytes(20_000_000)


def used(address: str, environ: dict[str, str], use: Callable[[Any], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        storage = open_storage(address, environ)
        try:
            return await use(storage)
        finally:
            await storage.close()

    return asyncio.run(run())


def test_the_files_directly_below(azurite: Azurite) -> None:
    files = {"a.tar": b"12345", "index.npz": b"", "below/c.tar": b"c", "tra in é%20.tar": b"odd"}
    address = azurite.upload(files, "my data/train set%1")
    listed = used(address, azurite.environment, lambda storage: storage.list())
    assert listed == {"a.tar": 5, "index.npz": 0, "tra in é%20.tar": 3}
    read = used(address, azurite.environment, lambda storage: storage.read("tra in é%20.tar", 1, 2))
    assert bytes(read) == b"dd"


def test_a_blob_that_was_written_anew_has_another_version(azurite: Azurite) -> None:
    address = azurite.upload({"a.tar": b"12345", "b.tar": b"12345"})

    async def replace(storage: AzureStorage) -> None:
        before = await storage.versions()
        azurite.replace(f"{address}/a.tar", b"54321")
        after = await storage.versions()
        assert {name for name in before if before[name] != after[name]} == {"a.tar"}
        assert address.split("/")[2] in await storage.place()

    used(address, azurite.environment, replace)


@pytest.mark.exhaustive  # half a minute for the uploads
def test_more_names_than_one_answer_holds(azurite: Azurite) -> None:
    container = azurite.upload({"x": b""}, "other").removesuffix("/other")
    client = azurite.client.get_container_client(container.removeprefix("az://"))
    names = {f"{number:05}.tar" for number in range(5_001)}  # an answer holds 5,000
    for name in names:
        client.upload_blob(f"many/{name}", b"")
    assert used(f"{container}/many", azurite.environment, lambda storage: storage.list()).keys() == names


def test_parts_are_the_blobs_own(azurite: Azurite) -> None:
    address = azurite.upload({"a.tar": CONTENT})
    chosen = random.Random(3)
    parts = [(start, chosen.randrange(100_000)) for start in chosen.sample(range(len(CONTENT) - 100_000), 200)]

    async def read(storage: AzureStorage) -> None:
        got = await asyncio.gather(*(storage.read("a.tar", start, length) for start, length in parts))
        assert [bytes(each) for each in got] == [CONTENT[start : start + length] for start, length in parts]
        assert await storage.read("a.tar", 1, len(CONTENT) - 1) == CONTENT[1:]
        assert await storage.read("a.tar", 5, 0) == b""

    used(address, azurite.environment, read)


def test_a_large_read_is_several_requests_at_once(azurite: Azurite, fault_proxy: FaultProxy) -> None:
    address = azurite.upload({"a.tar": CONTENT})
    read = used(address, fault_proxy.environment, lambda storage: storage.read("a.tar", 0, len(CONTENT)))
    assert read == CONTENT
    assert sorted(each.headers["range"] for each in fault_proxy.seen) == [
        "bytes=0-8388607",
        "bytes=16777216-19999999",
        "bytes=8388608-16777215",
    ]


def test_a_signature_reads_too(azurite: Azurite) -> None:
    address = azurite.upload({"a.tar": b"0123456789"})
    environ = {**azurite.environment, "AZURE_STORAGE_SAS_TOKEN": azurite.signature()}
    del environ["AZURE_STORAGE_ACCOUNT_KEY"]
    assert bytes(used(address, environ, lambda storage: storage.read("a.tar", 2, 3))) == b"234"


@pytest.mark.parametrize(
    ("path", "name", "length", "message"),
    [
        ("/set", "none.tar", 1, r"There is no blob az://[\w-]+/set/none.tar \(the service answered 404 BlobNotFound\)"),
        ("/set", "a.tar", 11, "a.tar ends after 10 bytes; 11 from byte 0 on were asked for"),
        ("/none", None, 0, "holds no blobs: there are none in the folder none in the container container"),
        ("-none/set", None, 0, "has no container container-[0-9]+-none. Check how it is spelt: az storage container"),
        ("-none/set", "a.tar", 1, "has no container container-[0-9]+-none"),
    ],
)
def test_what_is_not_there(azurite: Azurite, path: str, name: str | None, length: int, message: str) -> None:
    container = azurite.upload({"a.tar": b"0123456789"}).removesuffix("/set")

    def use(storage: AzureStorage) -> Awaitable[Any]:
        return storage.list() if name is None else storage.read(name, 0, length)

    with pytest.raises(StorageError, match=message):
        used(container + path, azurite.environment, use)


@pytest.mark.parametrize("status", [206, 416])
def test_a_part_behind_the_end(azurite: Azurite, fault_proxy: FaultProxy, status: int) -> None:
    """Azurite answers 206 to it, and Azure 416."""
    address = azurite.upload({"a.tar": b"0123456789"})
    if status == 416:
        fault_proxy.fail(416, "InvalidRange")
    with pytest.raises(StorageError, match=r"a\.tar ends before the part that was asked for"):
        used(address, fault_proxy.environment, lambda storage: storage.read("a.tar", 10, 1))


def test_a_wrong_key_is_named_and_not_shown(azurite: Azurite, caplog: pytest.LogCaptureFixture) -> None:
    address = azurite.upload({"a.tar": b"0123456789"})
    wrong = "d3Jvbmc" * 12 + "dw=="
    with pytest.raises(StorageError, match="asked for with AZURE_STORAGE_ACCOUNT_KEY, which is not") as raised:
        used(address, azurite.environment | {"AZURE_STORAGE_ACCOUNT_KEY": wrong}, lambda storage: storage.list())
    assert wrong not in str(raised.value) + caplog.text
    assert raised.value.__context__ is None  # obstore's error may hold a signature
    assert f"the storage account {ACCOUNT}" in str(raised.value)


def test_a_blob_that_changes_between_two_reads(azurite: Azurite) -> None:
    address = azurite.upload({"a.tar": b"0" * 100, "b.tar": b"2" * 100})

    async def read(storage: AzureStorage) -> None:
        assert bytes(await storage.read("a.tar", 0, 5)) == b"00000"
        azurite.replace(f"{address}/a.tar", b"1" * 100)
        with pytest.raises(StorageError, match=r"a\.tar was changed while it was read.*folder of its own"):
            await storage.read("a.tar", 5, 5)
        assert bytes(await storage.read("b.tar", 0, 2)) == b"22"

    used(address, azurite.environment, read)
