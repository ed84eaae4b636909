"""Ranks are threads here, at a port of this machine; tests/multiprocess/test_six_variables.py has real processes."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from tests.emulated import free_port

from azureml_strategy.cluster import detect_launch, learn_launch, node_discovery
from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.launch import Launch, PartialLaunch
from azureml_strategy.cluster.launchers import detect_ranks

PATIENT = timedelta(seconds=100)


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_discovery, "_PAUSE_SECONDS", 0.01)


def known(rank: int, processes: int, port: int, world_size: int = 4) -> PartialLaunch:
    node_rank, local_rank = divmod(rank, processes)
    return PartialLaunch(rank, world_size, local_rank, node_rank, "127.0.0.1", port)


def answers(*ranks: PartialLaunch, timeout: timedelta = PATIENT) -> list[int | str]:
    """What each of these ranks learns, or its error."""

    def ask(rank: PartialLaunch) -> int | str:
        try:
            return node_discovery._ask(rank, timeout)
        except LaunchError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(ask, ranks))


@pytest.mark.parametrize(("processes", "nodes"), [(1, 4), (2, 2), (4, 1)])
def test_all_learn_the_number_of_nodes(processes: int, nodes: int) -> None:
    port = free_port()
    assert answers(*(known(rank, processes, port) for rank in range(4))) == [nodes] * 4


def test_local_ranks_may_be_missing() -> None:
    port = free_port()
    assert answers(*(PartialLaunch(rank, 2, None, 0, "127.0.0.1", port) for rank in range(2))) == [1, 1]


def test_the_port_is_free_before_anyone_has_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks may go on at once to a process group, whose store has the same port."""
    port, bound = free_port(), []
    line = node_discovery._line

    def spied(message: dict[str, Any]) -> bytes:
        if "nodes" in message:
            with socket.create_server(("127.0.0.1", port)):
                bound.append(True)
        return line(message)

    monkeypatch.setattr(node_discovery, "_line", spied)
    assert answers(*(known(rank, 2, port) for rank in range(4))) == [2] * 4
    assert bound


def test_strangers_are_not_taken_for_ranks() -> None:
    """A scanner that hangs up, one that speaks HTTP, and torch's client, which speaks first."""
    port, told = free_port(), []
    leader = threading.Thread(target=lambda: told.extend(answers(known(0, 1, port, 2))))
    leader.start()
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"rank": 1}\n', b"\xff\x00\n"):
        stranger = None
        while stranger is None:
            try:
                stranger = socket.create_connection(("127.0.0.1", port))
            except ConnectionRefusedError:
                continue
        with stranger:
            stranger.sendall(words)
    assert answers(known(1, 1, port, 2)) == [2]
    leader.join()
    assert told == [2]


@contextmanager
def somebody_else(port: int) -> Iterator[None]:
    """A server that hangs up on whoever does not speak first."""
    with socket.create_server(("127.0.0.1", port)) as server:

        def serve() -> None:
            server.accept()[0].close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


def test_another_server_at_the_port_is_not_taken_for_rank_0() -> None:
    port = free_port()
    told: list[int | str] = []
    with somebody_else(port):
        follower = threading.Thread(target=lambda: told.extend(answers(known(1, 1, port, 2))))
        follower.start()
    assert answers(known(0, 1, port, 2)) == [2]
    follower.join()
    assert told == [2]


def test_rank_0_that_goes_away_is_named_at_once() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server, ThreadPoolExecutor(1) as pool:
        told = pool.submit(answers, known(1, 1, port, 2))
        with server.accept()[0] as connection, connection.makefile("rb") as lines:
            connection.sendall(node_discovery._GREETING)
            assert json.loads(lines.readline())["rank"] == 1
        (error,) = told.result()
    assert str(error).startswith(f"Rank 1 lost rank 0 (node 0, 127.0.0.1:{port})")


def test_missing_ranks_are_named_to_all_that_came() -> None:
    port = free_port()
    told = answers(known(0, 2, port), known(2, 2, port), timeout=timedelta(seconds=1))
    assert told[0] == told[1]
    assert f"only 2 of 4 ranks came to 127.0.0.1:{port} within 0:00:01" in str(told[0])
    assert "Missing: ranks 1, 3." in str(told[0])


def test_no_rank_0_is_said_in_time() -> None:
    (error,) = answers(known(1, 1, free_port()), timeout=timedelta(seconds=0.3))
    assert "rank 1 on " in str(error)
    assert "found no rank 0 at 127.0.0.1:" in str(error)


def test_a_long_wait_is_reported_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_discovery, "_REMIND_SECONDS", 0.1)
    with caplog.at_level(logging.WARNING, node_discovery.__name__):
        answers(known(0, 1, free_port(), 2), timeout=timedelta(seconds=0.35))
    assert "Still waiting for rank 1. If they make no Trainer, set AZUREML_NODE_COUNT" in caplog.messages[0]


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (error,) = answers(known(0, 1, port))
    assert f"cannot ask for it at 127.0.0.1:{port}" in str(error)
    assert "MASTER_PORT" in str(error)


def six(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        **{"AZUREML_RUN_ID": "quirky_plum", "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)},
        **{"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }


def test_what_was_learned_is_found_by_every_later_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name, value in six(0, 2, port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AZUREML_NODE_COUNT", "")  # so that it is removed after the test
    assert detect_ranks() == PartialLaunch(0, 2, 0, 0, "127.0.0.1", port)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(answers, PartialLaunch(1, 2, 1, 0, "127.0.0.1", port))
        launch = learn_launch()
        assert other.result() == [1]
    assert launch == Launch("pytorch", 0, 2, 0, 2, 0, 1, "127.0.0.1", port)
    assert os.environ["AZUREML_NODE_COUNT"] == "1"
    assert learn_launch() is detect_launch() is detect_ranks() is launch


def test_where_nothing_is_missing_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert learn_launch() is None
    for name, value in six(0, 2, free_port()).items():
        if name != "AZUREML_RUN_ID":
            monkeypatch.setenv(name, value)
    assert learn_launch() is None, "outside Azure ML"
    monkeypatch.setenv("AZUREML_RUN_ID", "quirky_plum")
    monkeypatch.setenv("AZUREML_NODE_COUNT", "1")
    assert learn_launch() is detect_launch() is not None
