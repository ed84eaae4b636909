"""Runs processes side by side, and ends all of them when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

# How long a process may take to end in order after SIGTERM. Azure gives a spot node at least 30 s.
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_LAST_LINES = 30
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_print_lock = threading.Lock()


@dataclass(frozen=True)
class Process:
    """One process to start: its name and node, for the output, its command and its whole environment."""

    name: str
    node: str
    command: Sequence[str]
    environ: Mapping[str, str]


@dataclass(frozen=True)
class PowerCut:
    """The end of a node in the middle of a run: its processes are gone at once, and nothing asks them.

    Attributes:
        node: which.
        at: when, on `time.monotonic`'s clock, in seconds.
    """

    node: str
    at: float


@dataclass(frozen=True)
class Outcome:
    """How the processes ended.

    Attributes:
        exit_code: 0, or what a shell would report: 128 + the signal for a process that died of one.
        failed: the process that failed first, if any.
        reason: `exit code 3`, or `SIGKILL`.
        last_lines: the end of that process's output.
        lost_node: the node that the power cut ended, if it came to that.
    """

    exit_code: int
    failed: str | None = None
    reason: str = ""
    last_lines: tuple[str, ...] = ()
    lost_node: str | None = None


@dataclass
class _Running:
    """A process, the thread that prints what it writes, and the end of that output."""

    process: Process
    popen: subprocess.Popen[bytes]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    unread: bool = False

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._forward, daemon=True)
        self.reader.start()

    def _forward(self) -> None:
        assert self.popen.stdout is not None
        for line in _lines(self.popen.stdout):
            self.last_lines.append(line)
            try:
                with _print_lock:
                    sys.stdout.write(f"[{self.process.name}, {self.process.node}] {line}\n")
                    sys.stdout.flush()
            except BrokenPipeError:  # `emulate ... | head` has seen enough
                self.unread = True
                return

    def is_alive(self) -> bool:
        """Whether the process runs, or anything that it has started."""
        if self.popen.poll() is None:
            return True
        try:
            os.killpg(self.popen.pid, 0)
        except ProcessLookupError:
            return False
        return True


class _Interrupted(BaseException):
    """SIGINT or SIGTERM reached this process."""

    def __init__(self, signum: int) -> None:
        self.exit_code = 128 + signum


def run_together(processes: Sequence[Process], power_cut: PowerCut | None = None) -> Outcome:
    """Start the processes and wait until all have ended well or one has not; then none is left.

    Each gets a session of its own, so that a Ctrl-C reaches them through this process only and whatever they start
    ends with them.

    Args:
        processes: what to start.
        power_cut: ends a node, and with it the rest, if they still run then.
    """
    running: list[_Running] = []
    with _interruptible():
        try:
            for process in processes:
                running.append(_start(process))
            return _wait(running, power_cut)
        except _Interrupted as interrupted:
            return Outcome(interrupted.exit_code)
        finally:
            _put_off_signals()
            _end(running)


def _start(process: Process) -> _Running:
    popen = subprocess.Popen(
        process.command,
        env=process.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return _Running(process, popen)


def _wait(running: Sequence[_Running], power_cut: PowerCut | None) -> Outcome:
    while True:
        codes = [one.popen.poll() for one in running]
        for one, code in zip(running, codes, strict=True):
            if code:
                return _failure(one, code)
        if all(code == 0 for code in codes):
            return Outcome(0)
        if power_cut is not None and time.monotonic() >= power_cut.at:
            _signal([one for one in running if one.process.node == power_cut.node], signal.SIGKILL)
            return Outcome(128 + signal.SIGKILL, lost_node=power_cut.node)
        if any(one.unread for one in running):
            _print_nowhere()
            return Outcome(128 + signal.SIGPIPE)
        time.sleep(_POLL_SECONDS)


def _failure(one: _Running, code: int) -> Outcome:
    one.reader.join(timeout=2)  # what it wrote last says why
    reason = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    exit_code = code if code > 0 else 128 - code
    return Outcome(exit_code, f"{one.process.name} ({one.process.node})", reason, tuple(one.last_lines))


def _print_nowhere() -> None:
    """Whoever read the output is gone; Python would complain about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(running: Sequence[_Running]) -> None:
    """End every process, and everything it has started, in order if it can and by force if not."""
    _signal(running, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(one.is_alive() for one in running) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    _signal(running, signal.SIGKILL)
    for one in running:
        one.popen.wait()
        one.reader.join(timeout=2)


def _signal(running: Sequence[_Running], signum: int) -> None:
    for one in running:
        try:
            os.killpg(one.popen.pid, signum)
        except ProcessLookupError:  # the whole group is gone
            continue


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM end the wait once; while the processes are being ended, they are put off."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        _put_off_signals()
        raise _Interrupted(signum)

    if not _in_main_thread():
        yield
        return
    before = {each: signal.signal(each, interrupt) for each in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _put_off_signals() -> None:
    if _in_main_thread():
        for each in _ENDING_SIGNALS:
            signal.signal(each, signal.SIG_IGN)


def _in_main_thread() -> bool:
    """Python allows signal handlers nowhere else."""
    return threading.current_thread() is threading.main_thread()


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """The lines of a stream; of a progress bar that rewrites its line, what it showed last."""
    for raw in stream:
        text = raw.decode(errors="replace").rstrip("\r\n")
        yield text.rsplit("\r", 1)[-1]
