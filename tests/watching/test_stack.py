from __future__ import annotations

import sysconfig
import threading

import torch
from lightning.pytorch.trainer import call

from azureml_strategy.watching.stack import communicates, frames_of, inside_trainer, own_place, place

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
    assert frames_of(thread.ident)[0][2] == "wait"
    assert not inside_trainer(thread.ident)
    go_on.set()
    thread.join()
