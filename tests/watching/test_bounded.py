from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore, TCPStore

from azureml_strategy.watching.bounded import BoundedStore, StoreLostError, within


@pytest.fixture
def store() -> BoundedStore:
    return BoundedStore(HashStore(), timeout_s=60)


def test_values_come_back_and_missing_ones_are_none(store: BoundedStore) -> None:
    assert store.get("a") is None
    store.set("a", "1")
    assert store.get_all(["a", "b"]) == {"a": "1", "b": None}
    assert store.get_all([]) == {}
    store.close()


def test_the_first_word_stays(store: BoundedStore) -> None:
    assert store.set_first("alarm", "mine") == "mine"
    assert store.set_first("alarm", "yours") == "mine"
    assert [store.add("read"), store.add("read")] == [1, 2]
    store.close()


def test_a_server_that_has_ended() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    store = BoundedStore(client, timeout_s=60)
    store.set("a", "1")
    del server
    with pytest.raises(StoreLostError, match="has ended") as lost:
        store.get("a")
    assert not lost.value.silent
    store.close()


def test_a_server_that_does_not_answer() -> None:
    answer = threading.Event()

    class Stopped(HashStore):
        def set(self, key: str, value: str) -> None:
            answer.wait()

    store = BoundedStore(Stopped(), timeout_s=0.05)
    with pytest.raises(StoreLostError, match="does not answer") as lost:
        store.set("a", "1")
    assert lost.value.silent
    store._timeout_s = 60
    store.renew(HashStore())
    store.set("a", "1")
    assert store.get("a") == "1"
    answer.set()
    store.close()


def test_what_takes_for_ever_is_left_behind() -> None:
    answer = threading.Event()
    assert within(0.05, answer.wait) is None
    answer.set()
    assert within(60, answer.wait)
