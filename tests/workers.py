"""`pytest --workers=8` runs tests in workers forked from the process that collected them, and keeps two cores busy.

Collecting 7,800 tests takes longer than most of them run, so it is done once. A unit is one test that takes long, a
file's short tests, or tests that share a fixture of their file. The units that take longest are handed out first, as
long as their processes are expected to use no more processors than there are; one that mostly waits takes a place
beside them. What they are expected to use is in tests/times.json: see tests/times.py.
"""

from __future__ import annotations

import faulthandler
import multiprocessing.util
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest
from _pytest.config import create_terminal_writer
from tests import empty_store, preloaded, times

# What a unit's tests are expected to take together, in seconds of one worker, unless they share a fixture.
_LONG = 1.0
# Of all processors. Expected use is an average, and was measured on a busy machine.
_FULL = 1.0
# What a worker may take at its end, in seconds, for what its tests share.
_ENDING = 200.0
# What those share that are in one unit: a fixture that lives longer than a test, but not as long as the worker.
_SHARED_SCOPES = {"class", "module", "package"}


@dataclass(eq=False)
class Unit:
    """Tests that one worker runs in a row, by their places in the session, with what they are expected to take."""

    tests: list[int]
    seconds: float
    processor: float

    @property
    def processors(self) -> float:
        return self.processor / max(self.seconds, 0.01)


@dataclass(eq=False)
class _Worker:
    pid: int
    pipe: Connection
    server: preloaded.Server
    ended: int  # can be read once the process is no more; a child of its own may still hold the pipe
    unit: Unit | None = None
    done: list[int] = field(default_factory=list)
    before: int | None = None  # the test that it ran last, of this unit or an earlier one


class _Next:
    """Stands for the test that comes next and is not known yet: what lives as long as the worker is kept."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session

    def listchain(self) -> list[Any]:
        return [self._session]


class Pool:
    """Runs a session's tests in forked workers; a worker that dies fails its test, and another takes its place."""

    def __init__(self, config: pytest.Config, count: int) -> None:
        self._config, self._count = config, count
        self._servers: preloaded.Servers | None = None
        self._workers: list[_Worker] = []

    def pytest_sessionstart(self) -> None:
        self._servers = preloaded.Servers(self._count)  # they import while this process collects

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} error(s) during collection")
        waiting = units(session.items)
        empty_store.make()
        multiprocessing.resource_tracker.ensure_running()  # type: ignore[attr-defined]
        try:
            assert self._servers is not None
            for server in self._servers.ready():
                self._workers.append(self._fork(session, server))
            self._run(session, waiting)
        except BaseException:  # Ctrl-C, or as many failures as were asked for: nobody waits for the others
            for worker in self._workers:
                os.kill(worker.pid, signal.SIGINT)
            self._end()
            raise
        for name in self._end():
            text = "it could not end what its tests share: what it wrote to standard error says why"
            self._report(pytest.TestReport(name, (name, None, name), {}, "failed", text, "teardown"))
        return True

    def _run(self, session: pytest.Session, waiting: list[Unit]) -> None:
        while waiting or any(worker.unit for worker in self._workers):
            self._hand_out(session, waiting)
            busy = [worker for worker in self._workers if worker.unit]
            if not busy:  # the one that was given something had died
                continue
            ready = wait([each for worker in busy for each in (worker.pipe, worker.ended)])
            for worker in busy:
                if worker.pipe in ready:
                    self._receive_from(session, worker)
                elif worker.ended in ready:
                    self._replace(session, worker)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)

    def _hand_out(self, session: pytest.Session, waiting: list[Unit]) -> None:
        cores = len(os.sched_getaffinity(0))
        for worker in list(self._workers):
            if worker.unit or not waiting:
                continue
            used = sum(each.unit.processors for each in self._workers if each.unit)
            free = max(_FULL * cores - used, 0)
            fitting = (unit for unit in waiting if not used or unit.processors <= free)
            unit = next(fitting, None)
            if unit is None:
                return
            waiting.remove(unit)
            worker.unit = unit
            worker.done = []
            if not _sent(worker.pipe, unit.tests):  # it has died since its last test
                self._replace(session, worker)

    def _receive_from(self, session: pytest.Session, worker: _Worker) -> None:
        received = _received(worker.pipe)
        if received is None:
            self._replace(session, worker)
            return
        kind, value = received
        hook = self._config.hook
        if kind == "report":
            self._report(hook.pytest_report_from_serializable(config=self._config, data=value))
        elif kind == "warning":
            shown = warnings.WarningMessage(UserWarning(value.pop("message")), UserWarning, "", 0)
            hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": shown, **value})
        elif kind == "test":
            place, taken = value
            worker.done.append(place)
            worker.before = place
            times.of(self._config).add(*taken)
        else:
            assert worker.unit is not None
            assert worker.done == worker.unit.tests, "a unit has ended, but not all of its tests"
            worker.unit = None

    def _report(self, report: pytest.TestReport) -> None:
        self._config.hook.pytest_runtest_logreport(report=report)

    def _replace(self, session: pytest.Session, worker: _Worker) -> None:
        """The test that a worker died in has failed; another worker runs those that were to follow."""
        self._workers.remove(worker)  # first: Ctrl-C ends those that are there, and this one is not
        code = self._left(worker)
        assert worker.unit is not None
        left = [place for place in worker.unit.tests if place not in worker.done]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with {code}"
        item = session.items[left[0]] if left else session.items[worker.unit.tests[-1]]
        after = "" if worker.before is None else f", after {session.items[worker.before].nodeid},"
        text = f"the worker that ran {item.nodeid}{after} {how}"
        self._report(pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call"))
        again = self._fork(session, worker.server)
        self._workers.append(again)
        if left[1:]:
            again.unit = Unit(left[1:], worker.unit.seconds, worker.unit.processor)
            again.pipe.send(again.unit.tests)

    def _fork(self, session: pytest.Session, server: preloaded.Server) -> _Worker:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            theirs.close()
            return _Worker(pid, ours, server, os.pidfd_open(pid))
        try:
            ours.close()
            for other in self._workers:  # or one would not learn that the others' other end is gone
                other.pipe.close()
            _work(session, theirs, server)
        except (KeyboardInterrupt, BrokenPipeError):  # the process that would hear of it ends
            os._exit(2)
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(3)
        os._exit(0)

    def _end(self) -> list[str]:
        """The workers that could not end as they should."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.pipe.close()  # it ends what it shares among tests, and leaves
        return [f"worker {worker.pid}" for worker in workers if self._left(worker)]

    @staticmethod
    def _left(worker: _Worker) -> int:
        """The exit code of a worker that leaves, or minus the signal that ended it."""
        _, status = os.waitpid(worker.pid, 0)
        os.close(worker.ended)
        worker.pipe.close()
        return os.waitstatus_to_exitcode(status)

    def pytest_sessionfinish(self) -> None:
        if self._servers is not None:
            self._servers.close()


class _Telling:
    """A worker's plugin: what a test gives to report goes to the process that shows it."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if when != "runtest":  # it has been told before this process was forked
            return
        message = f"{warning_message.category.__name__}: {warning_message.message}"
        message = f"{warning_message.filename}:{warning_message.lineno}: {message}"
        value = {"message": message, "when": when, "nodeid": nodeid, "location": location}
        self._pipe.send(("warning", value))


def _work(session: pytest.Session, pipe: Connection, server: preloaded.Server) -> None:
    config = session.config
    _be_a_worker(config, pipe)
    server.use()
    meter = times.Meter(server.pid)
    following: Any = _Next(session)
    try:
        while places := _received(pipe):
            for place, after in zip(places, [*places[1:], None], strict=True):
                item = session.items[place]
                meter.start()
                config.hook.pytest_runtest_protocol(
                    item=item, nextitem=following if after is None else session.items[after]
                )
                pipe.send(("test", (place, (item.nodeid, *meter.stop()))))
            pipe.send(("unit", None))
    finally:  # what several tests share, such as a server, ends with the worker, whoever is in a hurry
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        faulthandler.dump_traceback_later(_ENDING, exit=True)
        for program in multiprocessing.active_children():  # its own end would wait for them
            program.kill()
        session._setupstate.teardown_exact(None)
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]


def _received(pipe: Connection) -> Any:
    """What the other end has sent; None if it is gone."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return None


def _sent(pipe: Connection, what: Any) -> bool:
    """Whether the other end is still there to get it."""
    try:
        pipe.send(what)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _be_a_worker(config: pytest.Config, pipe: Connection) -> None:
    """Output, temporary folders and reports of its own: those of the process it was forked from are shared."""
    plugins = config.pluginmanager
    capture: Any = plugins.getplugin("capturemanager")
    if capture._global_capturing is not None:
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    for name in ("terminalreporter", "junitxml"):
        if plugin := plugins.getplugin(name):
            plugins.unregister(plugin)
    writer = create_terminal_writer(config, sys.stderr)  # pytest-timeout writes all stacks there
    config.get_terminal_writer = lambda: writer  # type: ignore[method-assign]
    os.register_at_fork(after_in_child=pipe.close)  # a child that comes back from its test speaks for no worker
    plugins.register(_Telling(config, pipe))
    factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"worker-{os.getpid()}"
    factory._basetemp.mkdir(mode=0o700)


def units(items: list[pytest.Item]) -> list[Unit]:
    """The units of a session, those that take longest first."""
    expected = times.Expected.read()
    found: list[Unit] = []
    for _, group in groupby(range(len(items)), key=lambda place: items[place].path):
        found += _of_a_file(list(group), items, expected)
    return sorted(found, key=lambda unit: -unit.seconds)


def _of_a_file(places: list[int], items: list[pytest.Item], expected: times.Expected) -> Iterator[Unit]:
    together: list[int] = []
    for place in places:
        seconds, processor = expected.of(items[place].nodeid)
        if seconds >= _LONG and not _shares(items[place]):
            yield Unit([place], seconds, processor)
        else:
            together.append(place)
    if together:
        both = [expected.of(items[place].nodeid) for place in together]
        yield Unit(together, sum(each[0] for each in both), sum(each[1] for each in both))


def _shares(item: pytest.Item) -> bool:
    info = getattr(item, "_fixtureinfo", None)
    definitions = info.name2fixturedefs.values() if info else ()
    return any(each.scope in _SHARED_SCOPES for found in definitions for each in found)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run tests in N forked workers")


def pytest_configure(config: pytest.Config) -> None:
    """A debugger and a list of tests need none."""
    count = config.getoption("--workers")
    if count and not config.option.usepdb and not config.option.collectonly:
        config.pluginmanager.register(Pool(config, count), "workers")
