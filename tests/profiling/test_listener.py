from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from azureml_strategy.profiling.listener import SignalListener

# SIGUSR2 may be used by whoever runs these tests.
NAME, NUMBER = "SIGUSR1", signal.SIGUSR1


@pytest.fixture(autouse=True)
def _free() -> Iterator[None]:
    given = signal.signal(NUMBER, signal.SIG_DFL)
    yield
    signal.signal(NUMBER, given)


def test_a_free_signal_is_taken_and_given_back() -> None:
    seen: list[int] = []
    listener = SignalListener(NAME, lambda number, frame: seen.append(number))
    assert listener.taken
    os.kill(os.getpid(), NUMBER)
    assert seen == [NUMBER]
    listener.close()
    assert signal.getsignal(NUMBER) is signal.SIG_DFL


def test_a_signal_that_a_script_uses_is_left_alone() -> None:
    seen: list[int] = []
    signal.signal(NUMBER, lambda number, frame: seen.append(number))
    listener = SignalListener(NAME, lambda number, frame: pytest.fail("it has been taken"))
    assert not listener.taken
    os.kill(os.getpid(), NUMBER)
    listener.close()
    os.kill(os.getpid(), NUMBER)
    assert seen == [NUMBER, NUMBER]


def test_a_signal_that_faulthandler_uses_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(NUMBER, file=file)
        try:
            assert not SignalListener(NAME, lambda number, frame: None).taken
        finally:
            faulthandler.unregister(NUMBER)


def test_an_ignored_signal_is_left_alone() -> None:
    signal.signal(NUMBER, signal.SIG_IGN)
    assert not SignalListener(NAME, lambda number, frame: None).taken


def test_a_handler_of_the_script_that_came_later_stays() -> None:
    listener = SignalListener(NAME, lambda number, frame: None)
    later = signal.default_int_handler
    signal.signal(NUMBER, later)
    listener.close()
    assert signal.getsignal(NUMBER) is later
