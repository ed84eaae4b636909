"""Ranks as threads over one in-memory store, at speeds of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from tests.control.stores import shared
from tests.control.test_channel import Cut, Stopped, until

from azureml_strategy.control import agreement as agreement_module
from azureml_strategy.control import store as waiting
from azureml_strategy.control.agreement import StopAgreement
from azureml_strategy.control.channel import Channel
from azureml_strategy.control.store import ControlStore

RANKS, MOST_STEPS = 4, 100_000


class Wish:
    """A rank's reason to stop, once it has one."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def __call__(self) -> str | None:
        return self.reason


@pytest.fixture
def wishes() -> list[Wish]:
    return [Wish() for _ in range(RANKS)]


@pytest.fixture
def agreements(wishes: list[Wish]) -> Iterator[list[StopAgreement]]:
    stores = shared(RANKS)
    ranks = [StopAgreement(store, wishes[store.rank], 0.2) for store in stores]
    yield ranks
    for rank in ranks:
        rank.close()
    for store in stores:
        store.close()


def steps_until_stop(agreement: StopAgreement, seconds_per_step: float, barrier: threading.Barrier | None) -> int:
    """Train until told to stop; with a barrier, the ranks do each step together, as under DDP."""
    for step in range(1, MOST_STEPS):
        time.sleep(seconds_per_step)
        if barrier is not None:
            barrier.wait(timeout=120)
        if agreement.step_done():
            return step
    raise AssertionError("never told to stop")


@pytest.mark.parametrize("asking", [(0,), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize("together", [True, False])
def test_all_ranks_stop_after_the_same_step(
    agreements: list[StopAgreement], wishes: list[Wish], asking: tuple[int, ...], together: bool
) -> None:
    """In step as under DDP, and out of step as where a GPU's queue lets one host run ahead of the others."""
    barrier = threading.Barrier(RANKS) if together else None
    with ThreadPoolExecutor(RANKS) as pool:
        runs = [
            pool.submit(steps_until_stop, agreement, 0.001 if together else 0.002 * (rank + 1), barrier)
            for rank, agreement in enumerate(agreements)
        ]
        time.sleep(0.2)
        for rank in asking:
            wishes[rank].reason = f"rank {rank}"
        assert len({run.result(timeout=200) for run in runs}) == 1
    (reason,) = {agreement.reason for agreement in agreements}
    assert reason in {f"rank {rank}" for rank in asking}


def test_nobody_stops_unasked(agreements: list[StopAgreement]) -> None:
    time.sleep(0.7)
    assert not any(agreement.step_done() for agreement in agreements for _ in range(100))


def test_a_lost_store_does_not_stop_training() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    _, store = shared(2, [dist.HashStore(), client])
    agreement = StopAgreement(store, lambda: "told to")
    del server
    time.sleep(1.2)
    assert not agreement.step_done()
    agreement.close()
    store.close()


def reach_own_promise(agreement: StopAgreement) -> bool:
    return any(agreement.step_done() for _ in range(5))


@pytest.mark.parametrize("asking", range(2))
def test_main_threads_do_not_wait_for_a_rank_that_has_left(asking: int) -> None:
    stores, wish = shared(2), Wish()
    ranks = [StopAgreement(store, wish if store.rank == asking else lambda: None, 0.05) for store in stores]
    ranks[1 - asking].close()
    wish.reason = "told to"
    until(lambda: ranks[asking]._promise is not None)
    assert not reach_own_promise(ranks[asking])
    assert ranks[asking].error == f"rank {1 - asking} has left"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_ASK_SECONDS", 0.02)
    monkeypatch.setattr(waiting, "_SILENCE_SECONDS", 1.0)


def test_main_threads_do_not_wait_for_a_rank_that_is_silent(hasty: None) -> None:
    stores = shared(3)
    ranks = [StopAgreement(store, lambda: "told to", 0.05) for store in stores[:2]]
    stores[2].channel.close()
    until(lambda: all(rank._promise is not None for rank in ranks))
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(reach_own_promise, ranks)) == [False, False]
    assert {rank.error for rank in ranks} == {"nothing has been heard of rank 2 for 1 s"}
    assert stores[1].get("stop") == "never nothing has been heard of rank 2 for 1 s"


def test_a_rank_that_loses_the_store_ends_the_waits_of_all() -> None:
    memory = dist.HashStore()
    cut = Cut(memory)
    back = threading.Event()
    first, second = shared(2, [memory, cut], connect=lambda: memory if back.is_set() else None)
    ranks = [StopAgreement(first, lambda: "told to", 0.05)]
    until(lambda: first.get("promise/0"))
    cut.ended = True
    ranks.append(StopAgreement(second, lambda: "told to", 0.05))
    ranks[1]._make_promise = lambda: None  # type: ignore[method-assign]
    ranks[1]._promise = 2
    assert not reach_own_promise(ranks[1])
    assert ranks[1].error == "rank 1: the rendezvous store has ended"
    back.set()
    second.channel.every(0.1, second.channel._send_heartbeat)  # the next one tells
    assert not reach_own_promise(ranks[0])
    assert ranks[0].error == "rank 1: the rendezvous store has ended"


def test_a_store_that_answers_no_more_does_not_hold_a_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement_module, "_WAIT_SECONDS", 0.05)
    silent = Stopped()
    channel = Channel(silent)
    store = ControlStore(channel, "test", 1, ["0", channel.id], timeout_s=0.1)
    agreement = StopAgreement(store, lambda: "told to", 0.05)
    agreement._promise = 2
    assert not reach_own_promise(agreement)
    assert agreement.error == "rank 1: the rendezvous store does not answer"
    silent.goes_on.set()
    until(lambda: store.get("stop"))  # the others learn of it when the store answers again
    assert store.get("stop") == "never rank 1: the rendezvous store does not answer"
    channel.close()
