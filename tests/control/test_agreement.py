"""Ranks as threads over one in-memory store, at speeds of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from azureml_strategy.control.agreement import StopAgreement

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
    store = dist.HashStore()
    ranks = [StopAgreement(store, rank, RANKS, wishes[rank], 0.2) for rank in range(RANKS)]
    yield ranks
    for rank in ranks:
        rank.close()


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
    agreement = StopAgreement(client, 1, 2, lambda: "told to")
    del server
    time.sleep(1.2)
    assert not agreement.step_done()
    agreement.close()
