"""Ranks as threads over one in-memory store, which wait, leave, fall silent or are set free."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist
from tests.control.stores import shared

from azureml_strategy.control.agreement import State, StopBarrier

RANKS = 3


def standing(pool: ThreadPoolExecutor, states: list[Callable[[], State]]) -> list[Future[bool]]:
    stores = shared(len(states))
    return [pool.submit(StopBarrier(store, state, 300).goes_on) for store, state in zip(stores, states, strict=True)]


def always(state: State) -> Callable[[], State]:
    return lambda: state


def until(seconds: float, before: State, after: State) -> Callable[[], State]:
    end = time.monotonic() + seconds
    return lambda: before if time.monotonic() < end else after


def test_all_free_go_on_at_once() -> None:
    with ThreadPoolExecutor(RANKS) as pool:
        assert [each.result(200) for each in standing(pool, [always("free")] * RANKS)] == [True] * RANKS


@pytest.mark.parametrize("leaving", range(RANKS))
def test_one_that_leaves_takes_all_with_it(leaving: int) -> None:
    states: list[Callable[[], State]] = [always("waiting")] * RANKS
    states[leaving] = until(0.5, "waiting", "leaving")
    with ThreadPoolExecutor(RANKS) as pool:
        assert [each.result(200) for each in standing(pool, states)] == [False] * RANKS


@pytest.mark.parametrize("waiting", range(RANKS))
def test_all_wait_for_one_and_go_on_when_it_is_free(waiting: int) -> None:
    states = [always("free")] * RANKS
    started = time.monotonic()
    states[waiting] = until(1.0, "waiting", "free")
    with ThreadPoolExecutor(RANKS) as pool:
        assert [each.result(200) for each in standing(pool, states)] == [True] * RANKS
    assert time.monotonic() - started >= 1


def test_one_rank_alone() -> None:
    assert StopBarrier(shared(1)[0], always("free")).goes_on()
    assert not StopBarrier(shared(1)[0], always("leaving")).goes_on()


def test_a_rank_that_comes_late_is_waited_for() -> None:
    stores = shared(2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(StopBarrier(stores[0], always("free")).goes_on)
        time.sleep(0.6)
        assert not first.done()
        assert StopBarrier(stores[1], always("free")).goes_on()
        assert first.result(200)


def test_a_rank_that_is_gone_ends_the_wait() -> None:
    store, gone = shared(2)
    gone.set("state/1", "waiting")  # its last word
    gone.channel.close()
    assert not StopBarrier(store, always("free"), gone_s=0.8).goes_on()


def test_rank_0_is_gone_and_the_store_with_it() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    with ThreadPoolExecutor(1) as pool:
        _, store = shared(2, [dist.HashStore(), client])
        other = pool.submit(StopBarrier(store, always("waiting")).goes_on)
        time.sleep(0.5)
        del server
        assert not other.result(200)


def test_rank_0_is_silent_and_its_store_is_not() -> None:
    """As below torchrun, whose agent serves the store."""
    stores = shared(2)
    stores[0].channel.close()
    assert not StopBarrier(stores[1], always("free"), gone_s=0.8).goes_on()


def test_a_rank_that_leaves_ends_the_wait_of_the_others() -> None:
    stores = shared(2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(StopBarrier(stores[0].part("stop_barrier/1"), always("free")).goes_on)
        stores[1].close()
        assert not first.result(60)
