"""Threads of several ranks take steps together through a store."""

from __future__ import annotations

import importlib
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.control.stores import shared
from tests.control.test_channel import Cut
from torch.distributed import HashStore, Store, TCPStore
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from azureml_strategy.checkpoint.manifest import StoredFile
from azureml_strategy.control import channel
from azureml_strategy.control import gather as exchanging
from azureml_strategy.control import store as waiting
from azureml_strategy.control.gather import GroupExchange, StoreExchange
from azureml_strategy.control.messages import from_json, to_json
from azureml_strategy.control.store import ExchangeClosedError, ExchangeError, StepError

RANKS = 3


@pytest.fixture
def served() -> Callable[[], Store]:
    """Opens connections to a store of torch's, which is served on a port of this machine."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds without a sign of life are enough."""
    monkeypatch.setattr(channel, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(waiting, "_ASK_SECONDS", 0.02)
    monkeypatch.setattr(waiting, "_SILENCE_SECONDS", 2.0)
    monkeypatch.setattr(exchanging, "_LAST_READ_SECONDS", 0.1)


def all_of(work: Callable[[StoreExchange], Any], exchanges: Sequence[StoreExchange]) -> list[Any]:
    """What it returns on each rank, a thread of this process each; the error that it raises in its place."""

    def run(exchange: StoreExchange) -> Any:
        try:
            return work(exchange)
        except StepError as error:
            return str(error)

    with ThreadPoolExecutor(RANKS) as threads:
        found = list(threads.map(run, exchanges))
    for exchange in exchanges:
        exchange.close()
    return found


def on_all(work: Callable[[StoreExchange], Any], store: HashStore | None = None) -> list[Any]:
    return all_of(work, [StoreExchange(each) for each in shared(RANKS, [store or HashStore()] * RANKS)])


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

        exchange.on_all_ranks(lambda: exchange.on_all_ranks(inner))

    assert on_all(work) == [said] * RANKS


def test_nothing_is_left_in_the_store_but_the_last_answer() -> None:
    store = HashStore()

    def work(exchange: StoreExchange) -> None:
        for _ in range(5):
            exchange.gather("x" * 1000)
        exchange.leave()

    on_all(work, store)
    store.wait(["test/error"])  # the last word
    heartbeats = RANKS
    assert store.num_keys() <= 1 + heartbeats + 1


def test_one_that_is_closed_does_not_wait_for_ranks_that_are_gone() -> None:
    exchange = StoreExchange(shared(RANKS)[0])
    exchange.close()
    with pytest.raises(ExchangeClosedError):
        exchange.gather(None)
    assert not exchange.broken


@pytest.mark.parametrize("when", ["during", "between"])
def test_a_connection_that_is_lost_on_one_rank_costs_nothing(served: Callable[[], Store], when: str) -> None:
    cut = Cut(served())
    connections: list[Any] = [served(), served(), cut]

    def work(exchange: StoreExchange) -> list[list[int]]:
        first = exchange.gather(1)
        cut.ended |= exchange.rank == 2
        if when == "between":
            exchange.leave()
        return [first, exchange.gather(2)]

    exchanges = [StoreExchange(each) for each in shared(RANKS, connections, connect=served)]
    assert all_of(work, exchanges) == [[[1] * RANKS, [2] * RANKS]] * RANKS


def test_a_store_that_is_lost_for_a_while_on_one_rank_ends_the_waits_of_all(
    served: Callable[[], Store], hasty: None
) -> None:
    """The rank cannot tell the others at once, but it sends no heartbeats either until it has told them."""
    cut, back = Cut(served()), threading.Event()
    connections: list[Any] = [served(), served(), cut]

    def work(exchange: StoreExchange) -> None:
        exchange.gather(1)
        if exchange.rank == 2:
            cut.ended = True
            threading.Timer(0.5, back.set).start()
        exchange.gather(2)

    stores = shared(RANKS, connections, connect=lambda: served() if back.is_set() else None)
    exchanges = [StoreExchange(each) for each in stores]
    assert all_of(work, exchanges) == ["rank 2: StoreLostError: the rendezvous store has ended"] * RANKS
    assert all(each.broken for each in exchanges)


def test_a_rank_that_cannot_be_heard_any_more_is_given_up(served: Callable[[], Store], hasty: None) -> None:
    cut = Cut(served())
    connections: list[Any] = [served(), served(), cut]
    exchanges = [StoreExchange(each) for each in shared(RANKS, connections)]

    def work(exchange: StoreExchange) -> None:
        exchange.gather(1)
        cut.ended |= exchange.rank == 2
        exchange.on_all_ranks(lambda: exchange.gather(2))

    lost = "nothing has been heard of rank 2 for 2 s"
    assert all_of(work, exchanges) == [lost, lost, "rank 2: StoreLostError: the rendezvous store has ended"]


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_never_comes_is_given_up(served: Callable[[], Store], hasty: None, missing: int) -> None:
    stores = shared(RANKS, [served() for _ in range(RANKS)])
    stores.pop(missing).channel.close()
    lost = f"nothing has been heard of rank {missing} for 2 s"
    assert all_of(lambda exchange: exchange.gather(1), [StoreExchange(each) for each in stores]) == [lost] * 2


def test_a_rank_that_takes_its_time_is_waited_for(hasty: None) -> None:
    def work(exchange: StoreExchange) -> list[None]:
        return exchange.on_all_ranks(lambda: time.sleep(4 if exchange.rank == 1 else 0))

    assert on_all(work) == [[None] * RANKS] * RANKS


def test_what_cannot_be_sent_ends_the_waits_of_all() -> None:
    def work(exchange: StoreExchange) -> Any:
        return exchange.gather(threading.Lock() if exchange.rank == 1 else 1)

    assert on_all(work) == ["rank 1: TypeError: a _thread.lock cannot be told to other ranks"] * RANKS


def test_whatever_ends_a_writer_ends_the_waits_of_all() -> None:
    def work(exchange: StoreExchange) -> None:
        with exchange.sharing_errors():
            if exchange.rank == 2:
                raise MemoryError("no more")
            exchange.gather(1)

    assert on_all(work) == ["rank 2: MemoryError: no more"] * RANKS


def test_a_rank_that_leaves_early_is_not_waited_for() -> None:
    def work(exchange: StoreExchange) -> Any:
        return exchange.close() if exchange.rank == 1 else exchange.gather(1)

    assert on_all(work) == ["rank 1 has left", None, "rank 1 has left"]


def test_after_an_error_nothing_of_this_exchange_is_used() -> None:
    """Its ranks may be in different rounds."""

    def work(exchange: StoreExchange) -> str:
        with pytest.raises(ExchangeError):
            exchange.gather(threading.Lock() if exchange.rank == 1 else 1)
        exchange.gather("of the next checkpoint")
        return "this must not be reached"

    assert on_all(work) == ["rank 1: TypeError: a _thread.lock cannot be told to other ranks"] * RANKS


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_alone() -> None:
    for exchange in (StoreExchange(shared(1)[0]), GroupExchange(0)):
        assert exchange.on_all_ranks(lambda: 3) == [3]
        with pytest.raises(StepError, match="rank 0: ZeroDivisionError"):
            exchange.on_all_ranks(lambda: 1 // 0)
        exchange.leave()


class Malicious:
    """What runs a command when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._target}",)


def test_a_pickle_in_the_store_is_never_run(served: Callable[[], Store], tmp_path: Path, hasty: None) -> None:
    """By a plain client of the port, under each name that is read; the ranks learn that it is no message."""
    payload = pickle.dumps(Malicious(tmp_path / "run"))
    for key in ("1/1", "1/2", "1/all"):
        served().set(f"test {key}/{key}", payload)  # type: ignore[arg-type] # torch's annotation forgets bytes
        stores = shared(RANKS, [served() for _ in range(RANKS)], name=f"test {key}")
        exchanges = [StoreExchange(each) for each in stores]
        if key == "1/all":  # rank 0 would write over it
            exchanges[0].close()
            exchanges = exchanges[1:]
        else:
            exchanges = [each for each in exchanges if str(each.rank) != key[-1]]
        found = all_of(lambda exchange: exchange.gather(exchange.rank), exchanges)
        assert all("is no message" in text or "UnicodeDecodeError" in text for text in found), found
    assert not (tmp_path / "run").exists()


def test_messages_keep_their_types() -> None:
    importlib.import_module("azureml_strategy.strategies.model_parallel.checkpoint")  # registers torch's classes
    chunk = ChunkStorageMetadata(torch.Size([0, 4]), torch.Size([2, 4]))
    data = TensorWriteData(chunk, TensorProperties(torch.bfloat16), torch.Size([4, 4]))
    item = WriteItem(MetadataIndex("a.weight", torch.Size([0, 4]), 1), WriteItemType.SHARD, tensor_data=data)
    plan = SavePlan([item], _StoragePrefix("__1_"), {"a.weight": ("a", "weight", 0)})
    file = StoredFile(7, 3)
    told = (plan, [None, True, 1, -0.0, "x"], {1: {"size": torch.Size([1])}, "t": (1,)}, {"f": file})
    heard = from_json(to_json(told))
    assert heard == told
    assert repr(heard) == repr(told)
    assert [type(each) for each in heard[2].values()] == [dict, tuple]
    with pytest.raises(ValueError, match="is no message of a rank"):
        from_json('{"Popen": {"args": "touch here"}}')
    with pytest.raises(ValueError, match="is no constant"):
        from_json('{"torch": "load"}')


@pytest.mark.parametrize("other", [True, ("HangWatch", (None, "", 1))])
def test_ranks_with_other_callbacks_are_told_so(monkeypatch: pytest.MonkeyPatch, other: Any) -> None:
    monkeypatch.setattr(exchanging, "gather", lambda value: [value, other])
    with pytest.raises(RuntimeError, match="This rank has ProfileSteps, but rank 1 has not"):
        exchanging.open_shared_store("ProfileSteps", 0, 2, None)
