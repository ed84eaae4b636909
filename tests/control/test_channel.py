"""Calls, and what is called at intervals, on a connection that can end or fall silent."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.control.stores import shared
from torch.distributed import DistNetworkError, HashStore, Store, TCPStore

from azureml_strategy.control import channel as channels
from azureml_strategy.control.channel import Channel, StoreLostError, heartbeat_key, lease_channel, within
from azureml_strategy.control.store import ControlStore

# A thread that is in torch's code at nearly every moment, also when the script ends.
BUSY = """
from datetime import timedelta
from torch.distributed import TCPStore
from azureml_strategy.control.channel import Channel

server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
channel = Channel(TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False))
channel.every(0, lambda: channel.call(lambda store: store.set("a", "b"), 60))
channel.call(lambda store: store.wait(["a"], timedelta(seconds=60)), 60)
"""


class Cut:
    """A connection to a store that ends when somebody says so; from then on each call fails."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ended = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._store, name)

        def connected(*arguments: Any) -> Any:
            if self.ended:
                raise DistNetworkError("Connection reset by peer")
            return call(*arguments)

        return connected


class Stopped(HashStore):
    """A connection to a server that is stopped: it answers nothing until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.written: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.goes_on.wait()
        self.written.append(key)


@pytest.fixture
def store() -> ControlStore:
    return shared(1)[0]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_values_come_back_and_missing_ones_are_none(store: ControlStore) -> None:
    assert store.get("a") is None
    store.set("a", "1")
    assert store.get_all(["a", "b"]) == {"a": "1", "b": None}
    assert store.get_all([]) == {}
    store.delete("a", "b")
    assert store.get("a") is None
    store.close()


class Counted:
    """A connection that counts its calls."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.calls = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.calls += 1
        found: Callable[..., Any] = getattr(self._store, name)
        return found


def test_polling_costs_one_question_however_many_values_are_awaited() -> None:
    connection = Counted()
    (store,) = shared(1, [connection])
    until(lambda: connection.calls)  # the first heartbeat
    connection.calls = 0
    assert store.get("a") is None
    assert store.get_if_all(["a", "b", "c"]) is None
    assert connection.calls == 2
    for key in ("a", "b", "c"):
        store.set(key, key)
    assert store.get_if_all(["a", "b", "c"]) == ["a", "b", "c"]
    assert store.get_if_all([]) == []
    store.close()


def test_the_first_word_stays(store: ControlStore) -> None:
    assert store.set_first("alarm", "mine") == "mine"
    assert store.set_first("alarm", "yours") == "mine"
    store.close()


def test_a_server_that_has_ended() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    (store,) = shared(1, [client])
    store.set("a", "1")
    del server
    with pytest.raises(StoreLostError, match="has ended") as lost:
        store.get("a")
    assert not lost.value.silent
    store.close()


def test_a_connection_that_has_ended_is_replaced_and_nothing_is_lost() -> None:
    memory = HashStore()
    cut = Cut(memory)
    channel = Channel(cut, lambda: memory)  # type: ignore[arg-type]
    cut.ended = True
    channel.call(lambda store: store.set("a", "1"), 60)
    assert memory.get("a") == b"1"
    channel.close()


def test_a_server_that_does_not_answer_is_given_up_in_time() -> None:
    silent = Stopped()
    channel = Channel(silent)
    with pytest.raises(StoreLostError, match="does not answer") as lost:
        channel.call(lambda store: store.set("a", "1"), 0.05)
    assert lost.value.silent
    silent.goes_on.set()
    channel.call(lambda store: store.set("b", "1"), 60)
    assert "a" not in silent.written, "nobody waits for it any more"
    channel.close()


def test_a_connection_on_which_nothing_answers_is_replaced() -> None:
    silent, memory = Stopped(), HashStore()
    channel = Channel(silent, lambda: memory)
    channel.call(lambda store: store.set("a", "1"), 0.2)
    assert memory.get("a") == b"1"
    until(lambda: memory.check([heartbeat_key(channel.id)]))
    silent.goes_on.set()
    channel.close()


def test_what_is_due_is_called_at_intervals_until_no_more() -> None:
    channel, calls = Channel(HashStore()), []
    due = lambda: calls.append(channel.call(lambda store: store.check(["a"]), 60))  # noqa: E731
    channel.every(0.01, due)
    until(lambda: len(calls) > 3)
    channel.no_more(due)
    channel.call(lambda store: None, 60)  # the one under way is over
    number = len(calls)
    time.sleep(0.1)
    assert len(calls) == number
    channel.close()


def test_a_fault_in_what_is_due_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    channel, calls = Channel(HashStore()), []
    channel.every(0.01, lambda: {}["a"])
    channel.every(0.01, lambda: calls.append(1))
    until(lambda: len(calls) > 3)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]
    channel.close()


def test_a_lost_store_ends_nothing_that_is_due() -> None:
    memory = HashStore()
    cut, calls = Cut(memory), []
    channel = Channel(cut, lambda: None if cut.ended else memory)  # type: ignore[arg-type]
    channel.every(0.01, lambda: calls.append(channel.call(lambda store: store.check(["a"]), 60)))
    until(lambda: calls)
    cut.ended = True
    time.sleep(0.1)
    cut.ended, number = False, len(calls)
    until(lambda: len(calls) > number + 1)
    channel.close()


def test_what_is_sent_for_sure_comes_before_the_next_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "HEARTBEAT_SECONDS", 0.05)
    memory = HashStore()
    cut = Cut(memory)
    channel = Channel(cut, lambda: None if cut.ended else memory)  # type: ignore[arg-type]
    beat = heartbeat_key(channel.id)
    until(lambda: memory.check([beat]))
    cut.ended = True
    channel.send_for_sure("error", "lost", 1)
    silent_at = memory.get(beat)
    time.sleep(0.2)
    assert memory.get(beat) == silent_at
    assert not memory.check(["error"])
    cut.ended = False
    until(lambda: memory.get(beat) != silent_at)
    assert memory.get("error") == b"lost"
    channel.close()


def test_after_its_end_a_channel_is_lost_at_once() -> None:
    channel = Channel(HashStore())
    channel.close()
    with pytest.raises(StoreLostError):
        channel.call(lambda store: store.check(["a"]), 60)


def test_all_users_in_a_process_share_one_channel() -> None:
    first, second = lease_channel(1), lease_channel(1)
    assert first is not None
    assert second is not None
    assert first[0] is second[0]
    first[1]()
    assert second[0].call(lambda store: store.check(["a"]), 60) is False
    second[1]()
    with pytest.raises(StoreLostError):
        second[0].call(lambda store: store.check(["a"]), 60)
    third = lease_channel(1)
    assert third is not None
    assert third[0] is not second[0]
    third[1]()


def test_what_takes_for_ever_is_left_behind() -> None:
    answer = threading.Event()
    assert within(0.05, answer.wait) is None
    answer.set()
    assert within(60, answer.wait)


def test_a_call_under_way_does_not_abort_the_process_at_its_end() -> None:
    ended = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
