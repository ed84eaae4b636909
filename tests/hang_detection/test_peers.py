from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.clock import Clock
from tests.control.stores import shared
from tests.hang_detection.reports import heartbeat

from azureml_strategy.control.process import Member, this_process
from azureml_strategy.control.store import ControlStore
from azureml_strategy.hang_detection import peers as peers_module
from azureml_strategy.hang_detection.main_thread import START
from azureml_strategy.hang_detection.peers import Peers

Joins = Callable[..., Peers]


@pytest.fixture
def store() -> ControlStore:
    return shared(1)[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(peers_module, "time", clock)
    return clock


@pytest.fixture
def joins(store: ControlStore) -> Joins:
    def join(rank: int, *others: Member, start_limit_s: float = 600) -> Peers:
        members = {each: this_process(each, 0) for each in range(4)} | {each.rank: each for each in others}
        return Peers(store, rank, members, start_limit_s)

    return join


def test_those_that_have_left_do_not_hang(joins: Joins, store: ControlStore) -> None:
    peers = joins(0)
    for rank in (1, 2, 3):
        store.set(f"beat/{rank}", heartbeat(idle_s=9, over=True).to_json())
    peers.listen()
    assert peers.all_over()
    assert not peers.all_idle(), "nobody is left to wait for"
    store.set("beat/2", heartbeat(idle_s=601).to_json())
    peers.listen()
    assert peers.all_idle()
    assert not peers.all_over()
    store.set("beat/3", heartbeat(idle_s=9).to_json())
    peers.listen()
    assert not peers.all_idle()


def test_one_that_starts_may_be_silent_for_longer(joins: Joins, store: ControlStore) -> None:
    peers = joins(0)
    store.set("beat/1", replace(heartbeat(), phase=START).to_json())
    store.set("beat/2", heartbeat().to_json())
    store.set("beat/3", heartbeat(over=True).to_json())
    peers.listen()
    time.sleep(0.02)
    assert peers.dead(0.01) == (2,)
    assert peers.dead(60) == ()
    assert peers.silent(time.monotonic()) == (1, 2)


def test_one_that_has_met_the_others_and_never_speaks_is_as_late_as_one_that_starts(clock: Clock, joins: Joins) -> None:
    peers = joins(0)
    peers.listen()
    assert peers.dead(0) == ()
    peers = joins(0, start_limit_s=0.01)
    peers.listen()
    clock.now += 0.02
    assert peers.dead(0.01) == (1, 2, 3)


def test_only_those_are_silent_whom_one_listens_to(clock: Clock, joins: Joins, store: ControlStore) -> None:
    """A rank other than the first listens to rank 0 alone, and to all when nothing moves."""
    peers = joins(3)
    for rank in (0, 1, 2):
        store.set(f"beat/{rank}", heartbeat().to_json())
    peers.listen()
    clock.now += 0.02
    peers.listen([0])
    assert peers.dead(0.01) == (0,)
    peers.listen()
    assert peers.dead(0.01) == (0,), "the others have just been asked again"
    clock.now += 0.02
    peers.listen()
    assert peers.dead(0.01) == (0, 1, 2)


def test_a_process_that_ends_before_its_first_word_is_gone_for_those_that_see_it(joins: Joins) -> None:
    ended = replace(this_process(2, 0), pid=2**22 + 1)
    assert [joins(rank, ended).gone() for rank in (0, 1, 3)] == [(2,)] * 3
    elsewhere = replace(ended, processes="another machine")
    assert [joins(rank, elsewhere).gone() for rank in (0, 1, 3)] == [()] * 3


def test_a_process_that_has_ended_in_order_is_not_gone(joins: Joins, store: ControlStore) -> None:
    peers = joins(0, replace(this_process(1, 0), pid=2**22 + 1))
    assert peers.has_ended(1)
    assert peers.gone() == (1,)
    assert not peers.all_over()
    store.set("beat/1", heartbeat(over=True).to_json())
    assert peers.gone() == ()


def test_nobody_waits_for_processes_that_have_ended(joins: Joins, store: ControlStore) -> None:
    peers = joins(0, *(replace(this_process(rank, 0), pid=2**22 + rank) for rank in (1, 2, 3)))
    assert peers.all_over()
