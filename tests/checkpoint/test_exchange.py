"""Threads of several ranks take steps together through a store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from azureml_strategy.checkpoint.exchange import ExchangeClosedError, GroupExchange, StepError, StoreExchange

RANKS = 3


def on_all(work: Callable[[StoreExchange], Any], store: HashStore | None = None) -> list[Any]:
    """What it returns on each rank, a thread of this process each; the error that it raises in its place."""
    names = PrefixStore("test", store or HashStore())
    exchanges = [StoreExchange(names, rank, RANKS) for rank in range(RANKS)]

    def run(exchange: StoreExchange) -> Any:
        try:
            return work(exchange)
        except StepError as error:
            return str(error)

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(run, exchanges))


def test_values_of_all_on_all_again_and_again() -> None:
    def work(exchange: StoreExchange) -> list[Any]:
        return [exchange.gather((turn, exchange.rank)) for turn in range(4)]

    expected = [[(turn, rank) for rank in range(RANKS)] for turn in range(4)]
    assert on_all(work) == [expected] * RANKS


def test_rank_zero_acts_for_all() -> None:
    acted: list[int] = []

    def work(exchange: StoreExchange) -> str:
        return exchange.on_rank_zero(lambda: acted.append(exchange.rank) or "done")

    assert on_all(work) == ["done"] * RANKS
    assert acted == [0]


@pytest.mark.parametrize(
    ("error", "said"),
    [(OSError("the disk is full"), "rank 2: the disk is full"), (KeyError("x"), "rank 2: KeyError: 'x'")],
)
def test_a_failure_on_one_rank_is_one_on_all_even_inside_another_step(error: Exception, said: str) -> None:
    def work(exchange: StoreExchange) -> None:
        def inner() -> None:
            if exchange.rank == 2:
                raise error

        exchange.together(lambda: exchange.together(inner))

    assert on_all(work) == [said] * RANKS


def test_nothing_is_left_in_the_store_but_the_last_answer() -> None:
    store = HashStore()

    def work(exchange: StoreExchange) -> None:
        for _ in range(5):
            exchange.gather("x" * 1000)
        exchange.leave()

    on_all(work, store)
    assert store.num_keys() <= 1


def test_one_that_is_closed_does_not_wait_for_ranks_that_are_gone() -> None:
    exchange = StoreExchange(HashStore(), 0, RANKS)
    exchange.close()
    with pytest.raises(ExchangeClosedError):
        exchange.gather(None)


def test_alone() -> None:
    for exchange in (StoreExchange(HashStore(), 0, 1), GroupExchange(0)):
        assert exchange.together(lambda: 3) == [3]
        with pytest.raises(StepError, match="rank 0: ZeroDivisionError"):
            exchange.together(lambda: 1 // 0)
        exchange.leave()
