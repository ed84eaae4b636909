"""The instance metadata service, played by a real server that answers, errs, hangs and drips."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest
from tests.network.conftest import ASSET_TAG, NOBODY, Tree, metadata_service, says

from azureml_strategy.network.metadata import TIMEOUT_SECONDS, VM_SIZE_URL, instance_vm_size, is_azure_vm

PATIENT = 60.0  # seconds: an answer that comes is there at once, on a busy machine, too
Answer = Callable[[socket.socket], None]


def ask(answer: Answer, timeout_s: float = PATIENT) -> str | None:
    with metadata_service(answer) as (url, _):
        return instance_vm_size(url, timeout_s)


def raw(content: bytes) -> Answer:
    return lambda connection: connection.sendall(content)


@pytest.mark.parametrize("name", ["Standard_ND96isr_H100_v5", "Standard_HB120-16rs_v3", "standard_nc24r_promo"])
def test_the_name_that_it_answers(name: str) -> None:
    assert ask(says(name)) == name
    assert ask(says(f"{name}\n")) == name


def test_the_request_is_the_documented_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", NOBODY)  # a proxy would answer for a machine of its own
    with metadata_service(says("Standard_NC4as_T4_v3")) as (url, requests):
        assert instance_vm_size(url, PATIENT) == "Standard_NC4as_T4_v3"
    lines = requests[0].splitlines()
    assert lines[0] == "GET /metadata?format=text HTTP/1.1"
    assert "Metadata: true" in lines
    assert VM_SIZE_URL.startswith("http://169.254.169.254/metadata/instance/compute/vmSize?api-version=")


@pytest.mark.parametrize(
    "answer",
    [
        says("Standard_NC4as_T4_v3", "404 Not Found"),
        says("Standard_NC4as_T4_v3", "503 Service Unavailable"),
        says("Standard_NC4as_T4_v3", "302 Found"),
        says("<html>log in to the network first</html>"),
        says(""),
        says("x" * 100_000 + "?"),
        raw(b""),
        raw(b"\x00\xff\xfe" * 50),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: minus\r\n\r\n\xff\xff"),
        raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
        raw(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000),
        raw(b"HTTP/1.1 twohundred OK\r\n\r\n"),
    ],
    ids=["404", "503", "302", "html", "empty", "long", "closes", "binary", "length", "chunks", "headers", "status"],
)
def test_what_is_no_answer(answer: Answer) -> None:
    assert ask(answer) is None


def test_nobody_listens() -> None:
    assert instance_vm_size(NOBODY, PATIENT) is None


def test_a_service_that_hangs() -> None:
    answers = threading.Event()
    assert ask(lambda connection: answers.wait(), 0.3) is None
    answers.set()


def test_an_answer_that_drips() -> None:
    answered = threading.Event()

    def drip(connection: socket.socket) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nStandard_NC4as_T4_v3":
            connection.sendall(bytes([byte]))
            if answered.wait(0.1):
                return

    assert ask(drip, 0.3) is None  # each byte comes in time, all together do not
    answered.set()


def test_the_start_is_not_delayed() -> None:
    assert TIMEOUT_SECONDS <= 0.5


@pytest.mark.parametrize(
    ("content", "azure"),
    [(f"{ASSET_TAG}\n", True), ("", False), ("No Asset Tag\n", False), (b"\xff\x00", False), (None, False)],
)
def test_an_azure_vm_is_told_by_its_chassis(tree: Tree, content: str | bytes | None, azure: bool) -> None:
    if content is not None:
        tree.write("sys/class/dmi/id/chassis_asset_tag", content)
    assert is_azure_vm(tree.root / "sys") == azure


def test_the_asset_tag_spells_its_meaning() -> None:
    digits = "".join(ASSET_TAG.split("-"))
    assert bytes(int(digits[i : i + 2]) for i in range(0, len(digits), 2)).decode() == "MSFT AZURE VM"
