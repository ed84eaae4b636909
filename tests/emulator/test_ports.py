"""A port of a job's own."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore

from azureml_strategy.cluster.environ import BATCH_PORT
from azureml_strategy.emulator.ports import reserved_port


def test_two_jobs_at_once_have_different_ports() -> None:
    with reserved_port() as first, reserved_port() as second:
        assert first != second
        assert BATCH_PORT not in (first, second)


def test_rank_0_listens_on_the_port_while_it_is_reserved() -> None:
    with reserved_port() as port:
        store = TCPStore("127.0.0.1", port, 1, is_master=True, timeout=timedelta(seconds=10))
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_what_somebody_else_listens_on_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with reserved_port(preferred=taken) as port:
            assert port != taken


def test_a_port_is_free_again_afterwards() -> None:
    with reserved_port() as port:
        pass
    with socket.create_server(("127.0.0.1", port)):
        pass
