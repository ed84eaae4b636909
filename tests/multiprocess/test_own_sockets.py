"""What the scripts' count of connections is worth while other threads open, copy and close sockets."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from tests.multiprocess.conftest import scripts_on_path

with scripts_on_path():
    from own_sockets import own_connections


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server with two connections, while threads make and close copies of them, and other sockets and files."""
    over = threading.Event()

    def busy() -> None:
        while not over.is_set():
            copies = [os.dup(each.fileno()) for each in clients]
            with socket.socket(), open(os.devnull):
                pass
            for number in copies:
                os.close(number)

    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        clients = [socket.create_connection(("127.0.0.1", number)) for _ in range(2)]
        threads = [threading.Thread(target=busy) for _ in range(2)]
        for each in threads:
            each.start()
        yield number
        over.set()
        for each in threads:
            each.join()
        for client in clients:
            client.close()


def test_each_connection_counts_once(port: int) -> None:
    for _ in range(300):
        assert sum(each.ports[1] == port for each in own_connections()) == 2
