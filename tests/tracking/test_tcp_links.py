"""What is read of a process's connections, and that reading changes none of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest

from azureml_strategy.tracking.timing import rank_times
from azureml_strategy.tracking.timing.rank_times import read_links


@pytest.fixture
def default_timeout() -> Iterator[None]:
    """A script's own `socket.setdefaulttimeout`, under which a new socket object does not block."""
    socket.setdefaulttimeout(30.0)
    yield
    socket.setdefaulttimeout(None)


def connected(family: socket.AddressFamily, address: str) -> tuple[socket.socket, socket.socket, socket.socket]:
    listener = socket.create_server((address, 0), family=family)
    here = socket.create_connection(listener.getsockname()[:2])
    return listener, here, listener.accept()[0]


@pytest.mark.usefixtures("default_timeout")
def test_reading_links_changes_no_descriptor_of_the_process() -> None:
    """TCPStore, gloo and MLflow read from sockets that block."""
    listener, here, there = connected(socket.AF_INET, "127.0.0.1")
    datagram, pair = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socketpair()
    everything = (listener, here, there, datagram, *pair)
    try:
        for each in everything:
            os.set_blocking(each.fileno(), True)
        read_links()
        assert all(os.get_blocking(each.fileno()) for each in everything)
    finally:
        for each in everything:
            each.close()


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_connection_within_the_machine_is_no_link(
    family: socket.AddressFamily, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated nodes, and the ranks of one node: the load of the machine makes it slow, and no network."""
    listener, here, there = connected(family, address)
    with closing(listener), closing(here), closing(there):
        here.sendall(b"x" * 1000)
        assert there.recv(1000)
        assert address not in read_links()


def test_a_link_has_both_ends_and_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two addresses of this machine that count as another's here."""
    listener = socket.create_server(("127.0.0.3", 0))
    here = socket.create_connection(listener.getsockname(), source_address=("127.0.0.2", 0))
    there, (_, port) = listener.accept()
    with closing(listener), closing(here), closing(there):
        here.sendall(b"x" * 1000)
        assert read_links() == {}
        monkeypatch.setattr(rank_times, "ip_address", lambda _: SimpleNamespace(is_loopback=False))
        links = read_links()
        assert {peer: link.local_address for peer, link in links.items()} == {
            "127.0.0.3": "127.0.0.2",
            "127.0.0.2": "127.0.0.3",
        }
        assert all(0 <= link.busy_s < 5 for link in links.values())
        assert list(read_links(frozenset({port}))) == ["127.0.0.3"]
