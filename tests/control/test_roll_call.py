"""Ranks are threads here, round one store; tests/multiprocess/test_network.py has real processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from tests.clock import Clock
from torch.distributed import HashStore

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.control import roll_call
from azureml_strategy.control.roll_call import call_roll


def launch(rank: int, nodes: int = 2, processes: int = 2) -> Launch:
    node_rank, local_rank = divmod(rank, processes)
    return Launch("pytorch", rank, nodes * processes, local_rank, processes, node_rank, nodes, "127.0.0.1", 6105)


def outcomes(
    present: Mapping[int, str | None], *, nodes: int = 2, processes: int = 2, timeout_s: float = 120
) -> dict[int, str | None]:
    """What each present rank is told: the text of its error, or None."""
    store = HashStore()

    def arrive(rank: int) -> str | None:
        if rank == 0:  # its time begins when the others are there
            store.wait([f"arrived/{other}" for other in present if other != 0], timedelta(seconds=120))
        try:
            call_roll(store, launch(rank, nodes, processes), timedelta(seconds=timeout_s), present[rank])
        except LaunchError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(present)) as pool:
        return dict(zip(present, pool.map(arrive, present), strict=True))


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "_GRACE_SECONDS", 100.0)


def test_all_there_and_well() -> None:
    assert outcomes(dict.fromkeys(range(4))) == dict.fromkeys(range(4))


def test_all_know_the_processes_of_all() -> None:
    outcomes(dict.fromkeys(range(4)))
    assert {rank: member.node for rank, member in roll_call.members().items()} == {0: 0, 1: 0, 2: 1, 3: 1}
    assert {member.pid for member in roll_call.members().values()} == {os.getpid()}


def test_one_process_alone() -> None:
    assert outcomes({0: None}, nodes=1, processes=1) == {0: None}


def test_missing_ranks_are_named_by_node_on_every_rank_that_came() -> None:
    told = outcomes({0: None, 1: None, 2: None}, timeout_s=0.3)
    assert len(set(told.values())) == 1
    text = told[0]
    assert text is not None
    assert "3 of 4 processes came to the rendezvous at 127.0.0.1:6105 within 0:00:00.3" in text
    # Rank 2 came from node 1, so the host of rank 3 is known.
    assert "Missing: rank 3 (node 1, host " in text


def test_a_node_that_never_came_is_named_by_the_address_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZ_BATCH_HOST_LIST", "127.0.0.1,10.0.0.5,10.0.0.6")
    text = outcomes({0: None, 1: None, 4: None}, nodes=3, timeout_s=0.3)[0]
    assert text is not None
    # All these threads come from 127.0.0.1, so two addresses are silent while one node is: nothing is claimed.
    assert "ranks 2, 3 (node 1); rank 5 (node 2, host " in text
    assert "nothing came from" not in text
    monkeypatch.setenv("AZ_BATCH_HOST_LIST", "127.0.0.1,10.0.0.5")
    text = outcomes({0: None, 1: None}, timeout_s=0.3)[0]
    assert text is not None
    assert "Missing: ranks 2, 3 (node 1); nothing came from 10.0.0.5." in text


def test_long_runs_of_ranks_are_shortened() -> None:
    text = outcomes({0: None}, nodes=1, processes=8, timeout_s=0.2)[0]
    assert text is not None
    assert "Missing: ranks 1 to 7 (node 0, host " in text


def test_a_problem_of_one_rank_stops_all_with_its_text() -> None:
    told = outcomes({0: None, 1: None, 2: "no InfiniBand here.", 3: "no InfiniBand here."})
    assert len(set(told.values())) == 1
    assert told[0] is not None
    assert told[0].startswith("ranks 2, 3 on ")
    assert told[0].endswith(": no InfiniBand here.")


def test_different_problems_are_all_told() -> None:
    text = outcomes({0: "first.", 1: None, 2: "second.", 3: None})[1]
    assert text is not None
    assert [line.split(" on ")[0] for line in text.splitlines()] == ["rank 0", "rank 2"]


def test_a_long_wait_is_reported_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(roll_call, "time", Clock())
    monkeypatch.setattr(roll_call, "_POLL_SECONDS", 1.0)
    with caplog.at_level(logging.WARNING, roll_call.__name__):
        outcomes({0: None}, nodes=1, processes=2, timeout_s=150)
    assert [record.message.split(" (")[0] for record in caplog.records][:2] == ["Still waiting for rank 1"] * 2


def test_rank_0_that_dies_while_others_wait_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "_GRACE_SECONDS", 0.1)
    text = outcomes({1: None}, timeout_s=0.2)[1]
    assert text is not None
    assert text.startswith("Rank 1 lost rank 0 (node 0, 127.0.0.1:6105)")
