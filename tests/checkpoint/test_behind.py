"""One thing at a time on a thread."""

from __future__ import annotations

import logging
import threading

import pytest

from azureml_strategy.checkpoint.behind import Behind


def test_it_is_done_on_another_thread_and_waited_for() -> None:
    behind, go = Behind[str]("tester"), threading.Event()

    def work() -> str:
        go.wait()
        return threading.current_thread().name

    behind.begin(work)
    assert behind.busy
    go.set()
    assert behind.finish() == "tester"
    assert not behind.busy
    assert behind.finish() is None, "nothing else was begun"


def test_one_at_a_time() -> None:
    behind, go = Behind[None]("tester"), threading.Event()
    behind.begin(lambda: (go.wait(), None)[1])
    with pytest.raises(AssertionError, match="one at a time"):
        behind.begin(lambda: None)
    go.set()
    behind.finish()


def test_a_wait_that_is_interrupted_can_be_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    behind, go = Behind[int]("tester"), threading.Event()
    behind.begin(lambda: (go.wait(), 3)[1])
    with monkeypatch.context() as interrupted:
        interrupted.setattr(threading.Thread, "join", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            behind.finish()
    go.set()
    assert behind.finish() == 3


def test_a_failure_is_logged_and_gives_nothing(caplog: pytest.LogCaptureFixture) -> None:
    behind = Behind[int]("tester")
    with caplog.at_level(logging.WARNING):
        behind.begin(lambda: 1 // 0)
        assert behind.finish() is None
    assert "tester: ZeroDivisionError" in caplog.text
    behind.begin(lambda: 3)
    assert behind.finish() == 3


def test_what_takes_too_long_is_left_behind() -> None:
    behind, go = Behind[int]("tester"), threading.Event()
    behind.begin(lambda: int(go.wait()))
    assert behind.finish(timeout_s=0.01) is None
    go.set()
