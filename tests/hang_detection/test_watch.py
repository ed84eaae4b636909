"""Watches of ranks that are threads of this process."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.trainer import call
from tests.hang_detection.reports import heartbeat, report
from torch.distributed import HashStore, Store

from azureml_strategy.control import process
from azureml_strategy.control.channel import Channel
from azureml_strategy.control.process import Member, this_process
from azureml_strategy.control.store import ControlStore
from azureml_strategy.hang_detection import watch as watching
from azureml_strategy.hang_detection.diagnosis import Verdict
from azureml_strategy.hang_detection.main_thread import CHECKPOINT, END, Progress
from azureml_strategy.hang_detection.peers import Heartbeat
from azureml_strategy.hang_detection.watch import Failure, Watch


class Ending(HashStore):
    """A store whose connection can end."""

    ended = False

    def set(self, key: str, value: str) -> None:
        if self.ended:
            raise RuntimeError("Connection reset by peer")
        super().set(key, value)


class Rank:
    """A watch of one of two ranks, and what it did."""

    def __init__(
        self,
        rank: int,
        store: Store,
        connect: Callable[[], Store | None] = lambda: None,
        limit_s: float = 60.0,
        step: Callable[[], int] = lambda: 0,
        others: Sequence[Member] = (),
        dead_after_s: float = 60,
        kill: bool = False,
    ) -> None:
        self.ends: list[float] = []
        self.verdicts: list[Verdict] = []
        self.notes: list[str] = []
        self.progress = Progress(limit_s, limit_s)
        channel = Channel(store, connect)
        self.watch = Watch(
            ControlStore(channel, "test", rank, ["0", "1"], give_back=channel.close),
            {each: this_process(each, 0) for each in (0, 1)} | {each.rank: each for each in others},
            self.progress,
            step,
            threading.get_ident(),
            dead_after_s,
            0.02,
            SimpleNamespace(  # type: ignore[arg-type]
                report=self.verdicts.append, keep_trace=lambda _: None, note=self.notes.append
            ),
            self.ends.append,
            kill,
        )


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_STUCK_SECONDS", "_LEAVE_SECONDS"):
        monkeypatch.setattr(watching, name, 0.5)


@pytest.fixture
def alone(store: HashStore) -> None:
    """The other rank has left, and answers no alarm."""
    store.set("test/beat/1", heartbeat(over=True).to_json())


def inside_trainer(action: Callable[[], None]) -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(launcher=None))
    call._call_and_handle_interrupt(trainer, action)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def last_beat(store: Store, rank: int) -> Heartbeat | None:
    return Heartbeat.from_json(store.get(f"test/beat/{rank}").decode()) if store.check([f"test/beat/{rank}"]) else None


def is_over(store: Store, rank: int) -> bool:
    found = last_beat(store, rank)
    return found is not None and found.over


def test_a_call_that_has_failed_does_not_end_the_next_one(store: HashStore, quick: None, alone: None) -> None:
    made: list[Rank] = []

    def fails() -> None:
        made.append(Rank(0, store))
        made[0].watch.fail(Failure("ValueError: no labels", of_others=False))

    inside_trainer(fails)
    inside_trainer(lambda: time.sleep(1))
    assert made[0].ends == []


def test_a_main_thread_that_hangs_on_the_way_out_is_ended(store: HashStore, quick: None, alone: None) -> None:
    def fails() -> None:
        rank = Rank(0, store, kill=True)
        rank.watch.fail(Failure("ValueError: no labels", of_others=False))
        until(lambda: rank.ends)

    inside_trainer(fails)


def test_what_takes_long_on_the_way_out_is_left_alone(store: HashStore, quick: None, alone: None) -> None:
    """Such as an upload in somebody's `on_exception`."""

    def fails() -> None:
        rank = Rank(0, store)
        rank.watch.fail(Failure("ValueError: no labels", of_others=False))
        time.sleep(1)
        assert rank.ends == []

    inside_trainer(fails)


@pytest.mark.parametrize("phase", [CHECKPOINT, END])
def test_a_checkpoint_may_be_written_on_the_way_out(store: HashStore, quick: None, alone: None, phase: str) -> None:
    def fails() -> None:
        rank = Rank(0, store)
        rank.watch.fail(Failure("ValueError: no labels", of_others=False))
        rank.progress.note(phase)
        time.sleep(1)
        assert rank.ends == []

    inside_trainer(fails)


def test_a_call_that_nobody_has_closed_is_over_when_it_is_left(store: HashStore) -> None:
    inside_trainer(lambda: Rank(1, store) and None)
    until(lambda: is_over(store, 1))


def test_rank_0_stays_until_the_others_have_left(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.set("test/beat/1", heartbeat().to_json())
    monkeypatch.setattr(watching, "_CLOSE_SECONDS", 120)
    rank = Rank(0, store)
    closing = threading.Thread(target=rank.watch.close)
    closing.start()
    until(lambda: is_over(store, 0))
    closing.join(0.5)
    assert closing.is_alive()
    store.set("test/beat/1", heartbeat(over=True).to_json())
    closing.join(60)
    assert not closing.is_alive()


def test_a_rank_that_is_left_alone_does_not_hang(store: HashStore, alone: None) -> None:
    rank = Rank(0, store, limit_s=0.05)
    time.sleep(0.5)
    assert not store.check(["test/0/alarm"])
    rank.watch.close()


def test_a_connection_that_has_ended_is_opened_again(store: HashStore) -> None:
    first = Ending()
    rank = Rank(1, first, connect=lambda: store)
    until(lambda: last_beat(first, 1))
    first.ended = True
    until(lambda: last_beat(store, 1))
    rank.watch.close()
    assert is_over(store, 1)


def test_a_store_that_goes_in_order_is_no_alarm(capfd: pytest.CaptureFixture[str], quick: None) -> None:
    store = Ending()
    store.set("test/beat/0", heartbeat(over=True).to_json())

    def waits() -> None:
        rank = Rank(1, store)
        until(lambda: last_beat(store, 1))
        time.sleep(0.1)
        store.ended = True
        until(rank.watch._finished.is_set)
        time.sleep(0.7)
        assert rank.ends == []

    inside_trainer(waits)
    assert capfd.readouterr().err == ""


def speak(store: Store, rank: int, answers: bool = True) -> Callable[[], None]:
    """Play a rank that waits for the others, and answers alarms with a report; returns what ends it."""
    silent = threading.Event()

    def run() -> None:
        count, answered = 0, set()
        while not silent.wait(0.01):
            count += 1
            store.set(f"test/beat/{rank}", replace(heartbeat(idle_s=1000), count=count, limit_s=1).to_json())
            for number in range(9):
                if answers and number not in answered and store.check([f"test/{number}/alarm"]):
                    answered.add(number)
                    store.set(f"test/{number}/report/{rank}", report(communicates=True).to_json())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def end() -> None:
        silent.set()
        thread.join()

    return end


def test_a_stall_is_reported_once_and_again_after_the_ranks_have_gone_on(store: HashStore, quick: None) -> None:
    end = speak(store, 1)

    def trains() -> None:
        rank = Rank(0, store, limit_s=0.5)
        for number in (1, 2):
            until(lambda number=number: len(rank.verdicts) == number)
            time.sleep(0.8)
            assert len(rank.verdicts) == number, "once"
            assert len(rank.notes) == number - 1
            rank.progress.note("training")
            until(lambda number=number: len(rank.notes) == number)
            rank.progress._longest_s = 0
        assert rank.ends == []
        assert [(each.kind, each.final) for each in rank.verdicts] == [("stalled", False)] * 2
        assert re.match(r"Rank 0: the ranks go on, \d+ s after", rank.notes[0])
        end()
        store.set("test/beat/1", heartbeat(over=True).to_json())
        rank.watch.close()

    inside_trainer(trains)


def test_a_stall_ends_the_job_by_request(store: HashStore, quick: None) -> None:
    end = speak(store, 1)

    def hangs() -> None:
        rank = Rank(0, store, limit_s=0.5, kill=True)
        until(lambda: rank.ends)
        assert rank.verdicts[0].final
        end()

    inside_trainer(hangs)


def silent_rank(store: HashStore, other: Member, dead_after_s: float = 0.3) -> Rank:
    """Rank 0 of two, when it has found out what is the matter with the other, which speaks no more."""
    store.set("test/beat/1", heartbeat().to_json())
    rank = Rank(0, store, others=[other], dead_after_s=dead_after_s)
    until(lambda: rank.verdicts)
    return rank


def test_a_silent_process_of_this_machine_is_alive_if_the_kernel_says_so(store: HashStore, quick: None) -> None:
    def waits() -> None:
        rank = silent_rank(store, this_process(1, 0))
        time.sleep(1)
        (verdict,) = rank.verdicts
        assert not verdict.final
        assert f"its process {os.getpid()} is alive, but its Python does not run" in verdict.headline
        assert "gone" not in verdict.headline
        assert rank.ends == []
        end = speak(store, 1)
        rank.progress.note("training")
        until(lambda: rank.notes)
        end()
        store.set("test/beat/1", heartbeat(over=True).to_json())
        rank.watch.close()

    inside_trainer(waits)


def test_the_kernel_of_another_machine_is_asked_for_a_silent_process(store: HashStore, quick: None) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1]); "
         "import sys; sys.stdout.flush(); sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    member = Member(1, 1, "there", "another machine", 77, "1", "127.0.0.1", int(child.stdout.readline()))
    child.send_signal(signal.SIGSTOP)  # its kernel answers for it

    def waits() -> None:
        rank = silent_rank(store, member)
        assert rank.verdicts[0].headline.startswith(
            "rank 1 (node 1, host there) has not been heard of for 0 s: its process 77 is alive, but its Python does"
        )
        assert not rank.verdicts[0].final
        child.kill()
        until(lambda: len(rank.verdicts) == 2)
        assert rank.verdicts[1].headline.startswith("rank 1 (node 1, host there) is gone: its process was killed")
        assert rank.verdicts[1].final
        until(lambda: rank.ends)

    inside_trainer(waits)
    child.communicate()


def test_a_node_that_has_vanished_ends_the_job_after_a_second_time_of_silence(
    store: HashStore, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whose kernel nothing comes back, as where a queue of connections is full."""
    monkeypatch.setattr(process, "_ASK_SECONDS", 0.2)
    port = socket.create_server(("127.0.0.1", 0), backlog=0)
    vanished = Member(1, 1, "there", "another machine", 77, "1", *port.getsockname())

    def waits() -> None:
        rank = silent_rank(store, vanished, 2)  # which has met it, and filled the queue
        assert not rank.verdicts[0].final
        assert "its machine does not answer either" in rank.verdicts[0].headline
        until(lambda: len(rank.verdicts) == 2)
        assert (rank.verdicts[1].kind, rank.verdicts[1].final) == ("vanished", True)
        assert rank.verdicts[1].headline.startswith(
            "rank 1 (node 1, host there) is gone with its node: for 4 s none of"
        )
        until(lambda: rank.ends)

    inside_trainer(waits)


@pytest.mark.parametrize("port", [0, 1], ids=["no port", "refused from the start, as by a firewall"])
def test_a_process_that_nobody_can_be_asked_for_is_only_reported(store: HashStore, quick: None, port: int) -> None:
    def waits() -> None:
        rank = silent_rank(store, Member(1, 1, "there", "another machine", 77, "1", "127.0.0.1", port))
        time.sleep(1.5)
        assert [each.final for each in rank.verdicts] == [False]
        assert "whether its process is alive cannot be asked from here" in rank.verdicts[0].headline
        store.set("test/beat/1", heartbeat(over=True).to_json())
        rank.watch.close()

    inside_trainer(waits)


def fails_when_the_store_ends(first: Member) -> str:
    """A rank whose main thread hears that the connection to rank 0 has ended, of which nothing was heard before."""
    store = Ending()
    store.ended = True
    told: list[str | None] = []
    failure = Failure("RuntimeError: Connection closed by peer", of_others=True)
    inside_trainer(lambda: told.append(Rank(1, store, others=[first]).watch.fail(failure)))
    assert told[0] is not None
    return told[0]


def test_rank_0_that_is_killed_before_its_first_word_is_named() -> None:
    ended = replace(this_process(0, 0), pid=2**22 + 1, host="here")
    assert fails_when_the_store_ends(ended).startswith("rank 0 (node 0, host here) is gone: its process was killed")


@pytest.mark.parametrize("server", ["it", "torchrun's agent on its node"])
def test_rank_0_of_another_machine_is_named_by_what_it_serves(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(server != "it"))
    elsewhere = replace(this_process(0, 0), processes="another machine", host="there")
    said = f"rank 0 (node 0, host there) is gone: the rendezvous store, which {server} serves, has ended"
    assert fails_when_the_store_ends(elsewhere).startswith(said)


def test_rank_0_waits_for_one_that_it_has_not_heard_yet(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be slow to start, and would take the end of the store for that of rank 0."""
    monkeypatch.setattr(watching, "_CLOSE_SECONDS", 120)
    rank = Rank(0, store)
    closing = threading.Thread(target=rank.watch.close)
    closing.start()
    until(lambda: is_over(store, 0))
    other = Rank(1, store)
    until(lambda: last_beat(store, 1))
    assert closing.is_alive()
    other.watch.close()
    closing.join(60)
    assert not closing.is_alive()
    assert not store.check(["test/0/alarm"])


def test_a_store_that_is_lost_takes_no_less_than_a_stall(quick: None) -> None:
    store = Ending()
    store.set("test/beat/0", heartbeat().to_json())

    def waits() -> None:
        rank = Rank(1, store, limit_s=1.5)
        until(lambda: last_beat(store, 1))
        time.sleep(0.1)
        store.ended = True
        until(lambda: rank.ends)
        assert rank.ends[0] > 1.5
        assert "is gone: the rendezvous store, which it serves, has ended" in rank.notes[0]

    inside_trainer(waits)


def test_steps_are_progress(store: HashStore, alone: None) -> None:
    steps = iter(range(100_000))
    rank = Rank(0, store, step=lambda: next(steps))
    rank.progress._noted_at -= 1000
    until(lambda: rank.progress.idle_s < 10)
    rank.watch.close()


def test_a_fault_of_the_watch_is_none_of_the_run(store: HashStore, capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise AttributeError("no such step")

    rank = Rank(1, store, step=fails)
    until(rank.watch._finished.is_set)
    assert is_over(store, 1)
    assert "nobody watches for hangs any more: AttributeError: no such step" in capfd.readouterr().err
