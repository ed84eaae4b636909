from __future__ import annotations

import sysconfig
import threading
import time
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.trainer import call

from azureml_strategy.watching.stack import communicates, frames_of, is_inside, own_place, place, trainer_frame

TORCH = str(torch.__file__).removesuffix("__init__.py")
LIGHTNING = str(call.__file__).removesuffix("trainer/call.py")
STANDARD = sysconfig.get_path("stdlib")
WAIT = (f"{STANDARD}/threading.py", 327, "wait")
FETCH = (f"{TORCH}utils/data/_utils/fetch.py", 54, "fetch")
LOOP = (f"{LIGHTNING}loops/fit_loop.py", 455, "advance")
MINE, SCRIPT = ("/home/me/data.py", 30, "__getitem__"), ("/home/me/train.py", 9, "<module>")


def test_the_innermost_frame_of_ones_own_below_the_trainer() -> None:
    assert place([WAIT, MINE, FETCH, LOOP, SCRIPT]) == "/home/me/data.py:30 in __getitem__"
    assert own_place([WAIT, FETCH, LOOP, SCRIPT]) == "", "the script is where everything began"
    assert place([WAIT, FETCH, LOOP, SCRIPT]) == f"{STANDARD}/threading.py:327 in wait"
    assert place([]) == "?"


def test_packages_below_pythons_own_folder_are_not_its_own() -> None:
    installed = (f"{STANDARD}/site-packages/mine/data.py", 3, "read")
    assert place([WAIT, installed, LOOP]) == f"{installed[0]}:3 in read"


def test_inside_a_collective() -> None:
    collective = (f"{TORCH}distributed/distributed_c10d.py", 3252, "all_reduce")
    assert communicates([collective, MINE, LOOP])
    assert communicates([WAIT, collective, MINE])
    assert not communicates([MINE, collective])
    assert not communicates([])


def test_a_thread_that_waits() -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    assert thread.ident is not None
    deadline = time.monotonic() + 60
    while frames_of(thread.ident)[0][2] != "wait":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert trainer_frame(thread.ident) is None
    go_on.set()
    thread.join()


def called_by_trainer(action: Any) -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(launcher=None))
    call._call_and_handle_interrupt(trainer, action)


def test_a_second_call_of_the_trainer_is_not_the_first() -> None:
    main, found = threading.get_ident(), list[FrameType | None]()
    called_by_trainer(lambda: found.append(trainer_frame(main)))
    first = found[0]
    assert first is not None
    assert trainer_frame(main) is None
    inside = list[bool]()
    called_by_trainer(lambda: inside.append(is_inside(main, first)))
    assert inside == [False]


def test_a_call_is_not_over_while_another_trainer_is_called_in_it() -> None:
    main, inside = threading.get_ident(), list[bool]()

    def outer() -> None:
        frame = trainer_frame(main)
        assert frame is not None
        called_by_trainer(lambda: inside.append(trainer_frame(main) is not frame and is_inside(main, frame)))

    called_by_trainer(outer)
    assert inside == [True]
