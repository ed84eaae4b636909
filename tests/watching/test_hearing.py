from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.watching.reports import beat
from torch.distributed import HashStore

from azureml_strategy.watching.bounded import BoundedStore
from azureml_strategy.watching.hearing import Hearing
from azureml_strategy.watching.machine import Member, this_process
from azureml_strategy.watching.progress import START

Joins = Callable[..., Hearing]


@pytest.fixture
def shared() -> BoundedStore:
    return BoundedStore(HashStore(), timeout_s=60)


@pytest.fixture
def joins(shared: BoundedStore) -> Joins:
    def join(rank: int, member: Member | None = None, neighbours: tuple[int, ...] = ()) -> Hearing:
        hearing = Hearing(shared, member or this_process(rank, 0), 4, neighbours)
        hearing.introduce()
        return hearing

    return join


def test_those_that_have_left_do_not_hang(joins: Joins, shared: BoundedStore) -> None:
    hearing = joins(0)
    shared.set("beat/1", beat(idle_s=9, over=True).to_json())
    hearing.listen()
    assert hearing.all_over()
    assert not hearing.all_idle(), "nobody is left to wait for"
    shared.set("beat/2", beat(idle_s=601).to_json())
    hearing.listen()
    assert hearing.all_idle()
    assert not hearing.all_over()
    shared.set("beat/3", beat(idle_s=9).to_json())
    hearing.listen()
    assert not hearing.all_idle()


def test_one_that_starts_may_be_silent_for_longer(joins: Joins, shared: BoundedStore) -> None:
    hearing = joins(0)
    shared.set("beat/1", replace(beat(), phase=START).to_json())
    shared.set("beat/2", beat().to_json())
    shared.set("beat/3", beat(over=True).to_json())
    hearing.listen()
    time.sleep(0.02)
    assert hearing.dead(0.01) == (2,)
    assert hearing.dead(60) == ()
    assert hearing.silent(time.monotonic()) == (1, 2)


def test_only_rank_0_meets_all(joins: Joins) -> None:
    first, second, third = joins(0), joins(2, neighbours=(2, 3)), joins(3, neighbours=(2, 3))
    joins(1)
    for each in (first, second, third):
        each.meet()
    assert sorted(first.members) == [0, 1, 2, 3]
    assert sorted(second.members) == sorted(third.members) == [0, 2, 3]


def test_a_process_that_has_ended_in_order_is_not_gone(joins: Joins, shared: BoundedStore) -> None:
    hearing = joins(0)
    joins(1, replace(this_process(1, 0), pid=2**22 + 1))
    hearing.meet()
    assert hearing.has_ended(1)
    assert hearing.gone() == (1,)
    shared.set("beat/1", beat(over=True).to_json())
    assert hearing.gone() == ()
