from __future__ import annotations

import sysconfig
import threading
import time
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer import call
from tests.clock import Clock

from azureml_strategy.hang_detection import main_thread
from azureml_strategy.hang_detection.main_thread import (
    CHECKPOINT,
    START,
    STOP_BARRIER,
    Progress,
    communicates,
    frames_of,
    is_inside,
    own_place,
    place,
    trainer_frame,
)

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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(main_thread, "time", clock)
    return clock


def test_the_start_may_take_longer_until_a_batch_is_done(clock: Clock) -> None:
    notes = Progress(600, 1800)
    assert (notes.phase, notes.limit_s) == (START, 1800)
    notes.note("training")
    clock.now += 700
    assert notes.idle_s == 700
    assert notes.limit_s == 1800
    notes.batch_done("training")
    assert (notes.idle_s, notes.limit_s) == (0, 2100), "the first counts, as any pause"


def test_a_pause_may_take_three_times_as_long_as_the_longest(clock: Clock) -> None:
    notes = Progress(600, 1800)
    notes.batch_done("training")
    for pause_s in (150, 250, 200):
        clock.now += pause_s
        notes.note("training")
    assert notes.limit_s == 750


def test_only_the_training_has_the_shorter_limit(clock: Clock) -> None:
    notes = Progress(600, 1800)
    notes.batch_done("training")
    assert notes.limit_s == 600
    for phase in ("validation", "end of an epoch", "test"):
        notes.batch_done(phase)
        assert notes.limit_s == 1800


def test_what_another_thread_sees_is_progress(clock: Clock) -> None:
    notes = Progress(600, 1800)
    notes.note("training")
    clock.now += 500
    notes.touch()
    assert (notes.idle_s, notes.phase) == (0, "training")


def test_a_checkpoint_may_take_longer_and_does_not_count(clock: Clock) -> None:
    notes = Progress(600, 1800)
    notes.batch_done("training")
    notes.note(CHECKPOINT)
    assert notes.limit_s == 1800
    clock.now += 1000
    notes.note("training")
    assert notes.limit_s == 600


def test_standing_still_on_purpose_has_no_end(clock: Clock) -> None:
    notes = Progress(600, 1800)
    notes.batch_done("training")
    notes.note(STOP_BARRIER)
    clock.now += 10_000
    assert notes.idle_s < notes.limit_s
    notes.note("training")
    assert notes.limit_s == 600
