from __future__ import annotations

import itertools
import socket
import threading
import time
from datetime import timedelta

import pytest

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.control import rendezvous
from azureml_strategy.control.rendezvous import open_store


def launch(rank: int, port: int) -> Launch:
    return Launch("pytorch", rank, 2, 0, 1, rank, 2, "127.0.0.1", port)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_rank_0_serves_what_the_others_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_rounds", itertools.repeat(0))  # two ranks of one round, in one process here
    port, served = free_port(), []

    def late() -> None:
        time.sleep(0.3)  # the other rank has to wait for the address to answer
        served.append(open_store(launch(0, port), timedelta(seconds=120)))
        served[0].set("key", "value")

    thread = threading.Thread(target=late)
    thread.start()
    assert open_store(launch(1, port), timedelta(seconds=120)).get("key") == b"value"
    thread.join()


def test_a_second_group_of_a_process_does_not_see_the_keys_of_the_first() -> None:
    port = free_port()
    first = open_store(launch(0, port), timedelta(seconds=120))
    first.set("key", "value")
    # The server is shared, as it is with torch's own store.
    second = open_store(launch(0, port), timedelta(seconds=120))
    assert first.check(["key"])
    assert not second.check(["key"])


def test_no_rank_0_is_said_in_time_and_without_a_trace_of_torch(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:  # nobody listens there
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with pytest.raises(LaunchError, match=f"found no rendezvous at 127.0.0.1:{port} within 0:00:00.500000: rank 0"):
            open_store(launch(1, port), timedelta(seconds=0.5))
    assert capfd.readouterr() == ("", "")


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"Rank 0 cannot open the rendezvous at 127.0.0.1:{port}: .*MASTER_PORT"):
            open_store(launch(0, port), timedelta(seconds=5))


def test_the_agent_of_torchrun_serves_instead_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(LaunchError, match=r"Rank 0 on .* found no rendezvous"):
        open_store(launch(0, free_port()), timedelta(seconds=0.3))
