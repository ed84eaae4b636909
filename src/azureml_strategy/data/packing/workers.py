"""Runs the tasks of a packing in processes, which end with the one that started them, and shows the progress."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol, TypeVar

from azureml_strategy.data.packing.shards import PackError

# Seconds between two updates of the progress.
_UPDATE_S = 0.2
# Seconds between two lines where standard error is no terminal.
_LINE_S = 30.0

_counter: Any = None
_ending: Any = None


class Task(Protocol):
    """A piece of work of a packing process. It is done as a whole or not at all, and not twice."""

    def is_done(self) -> bool:
        """Whether an earlier run has done it."""

    def run(self, advance: Callable[[], None]) -> None:
        """Do it, and call `advance` after each sample."""


AnyTask = TypeVar("AnyTask", bound=Task)


class Stopped(Exception):  # noqa: N818 - not an error of this task
    """The packing was given up. The next packing runs this task again."""


class Meter:
    """Shows progress on standard error: a bar on a terminal, else a line now and then.

    Args:
        what: name of the work, such as `Packing images`.
        total: number of samples.
        done: samples that an earlier run has done.
    """

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._before = what, total, done
        self._started = self._printed = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._row = self._bar.add_task(what, total=total, completed=done)
        elif done:
            print(f"{what}: {done:,} of {total:,} are done already.", file=sys.stderr, flush=True)

    def show(self, done: int) -> None:
        """Show that so many samples were done by this run."""
        if self._bar is not None:
            self._bar.update(self._row, completed=self._before + done)
        elif time.monotonic() - self._printed >= _LINE_S:
            self._printed = time.monotonic()
            rate = done / (self._printed - self._started)
            left = f", {(self._total - self._before - done) / rate / 60:,.0f} min left" if rate else ""
            text = f"{self._what}: {self._before + done:,} of {self._total:,}, {rate:,.0f}/s{left}"
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Take the bar away, or leave it as it is if everything is done."""
        if self._bar is not None:
            self._bar.stop()


def run_tasks(tasks: Sequence[AnyTask], workers: int, meter: Meter) -> Iterator[AnyTask]:
    """Run tasks in so many processes, with 1 in this one, and yield each task when it is done.

    If the caller stops early, all that still run are given up.

    Raises:
        PackError: a process was killed, or as of the tasks.
        OSError: as of the tasks.
    """
    try:
        if workers == 1 or len(tasks) == 1:
            yield from _run_here(tasks, meter)
        elif tasks:
            yield from _run_in_processes(tasks, min(workers, len(tasks)), meter)
    finally:
        meter.end()


def _run_here(tasks: Sequence[AnyTask], meter: Meter) -> Iterator[AnyTask]:
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done % 16 == 0:
            meter.show(done)

    for task in tasks:
        task.run(advance)
        meter.show(done)
        yield task


def _run_in_processes(tasks: Sequence[AnyTask], workers: int, meter: Meter) -> Iterator[AnyTask]:
    # Not forked: pyarrow and others have threads, which a forked process would lack.
    context = multiprocessing.get_context("spawn")
    counter, ending = context.Value("q", 0), context.Event()
    with ProcessPoolExecutor(workers, context, _start_worker, (counter, ending)) as pool:
        try:
            running: dict[Future[None], AnyTask] = {pool.submit(_run_in_worker, task): task for task in tasks}
            while running:
                done, _ = wait(running, timeout=_UPDATE_S, return_when=FIRST_COMPLETED)
                meter.show(counter.value)
                for future in done:
                    task = running.pop(future)
                    future.result()
                    yield task
        except BrokenProcessPool as error:
            raise PackError(
                "A packing process was killed, most likely because memory ran out. Run the same command again "
                f"with fewer processes: --workers {max(1, workers // 2)}. It goes on where it was."
            ) from error
        finally:  # also if the caller stops early
            ending.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(counter: Any, ending: Any) -> None:
    global _counter, _ending
    _counter, _ending = counter, ending
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of them; the first process ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent ends. After a kill -9 of the parent it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_in_worker(task: Task) -> None:
    def advance() -> None:
        with _counter.get_lock():
            _counter.value += 1
        if _ending.is_set():
            raise Stopped

    task.run(advance)
