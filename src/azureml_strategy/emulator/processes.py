"""Runs processes side by side, ends all of them when one fails, and finds the sentence that says why it failed."""

from __future__ import annotations

import os
import re
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

from azureml_strategy.cluster.redaction import redact_text

_LONGEST = 500
# The last line of a traceback, and what our commands print before they end with exit code 2. Python 3.11 and later
# indent the traceback of a group of exceptions.
_ERROR = re.compile(
    r"(?:\[rank\d+\]: )?[\s|]*(?P<words>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?::\s.*|$))"
    r"|azureml-strategy: (?P<ours>.+)"
)
# Lines after an error that say nothing of it.
_HINTS = ("Set the environment variable HYDRA_FULL_ERROR", "To execute this with")

# How long a process has to end by itself after SIGTERM. Azure gives a spot node at least 30 s.
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_LAST_LINES = 30
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_print_lock = threading.Lock()


def error_sentence(lines: Sequence[str]) -> str:
    """Find the last error among the last lines that a process has printed; without an error, its last line.

    Args:
        lines: the lines, in the order in which they were printed.

    Returns:
        One line of 500 characters at most, without secrets; empty if the process has printed nothing.
    """
    found = [match["words"] or match["ours"] for match in map(_ERROR.match, lines) if match]
    spoken = [line.strip() for line in lines if line.strip() and not line.startswith(_HINTS)]
    return redact_text(" ".join((found or spoken or [""])[-1].split()))[:_LONGEST]


@dataclass(frozen=True)
class Process:
    """One process to start: name and node (shown in the output), command, and complete environment."""

    name: str
    node: str
    command: Sequence[str]
    environ: Mapping[str, str]


@dataclass(frozen=True)
class PowerCut:
    """The loss of a node in the middle of a run: all its processes are killed at once, without a signal to end first.

    Attributes:
        node: name of the node.
        at: time in seconds on `time.monotonic`'s clock.
    """

    node: str
    at: float


@dataclass(frozen=True)
class Outcome:
    """How the processes ended.

    Attributes:
        exit_code: 0, or the code that a shell would report: 128 + the signal if a signal killed the process.
        failed: the process that failed first, if any.
        reason: `exit code 3`, or `SIGKILL`.
        last_lines: the end of that process's output.
        lost_node: the node that the power cut ended, if it happened.
    """

    exit_code: int
    failed: str | None = None
    reason: str = ""
    last_lines: tuple[str, ...] = ()
    lost_node: str | None = None


@dataclass
class _Running:
    """A process, the thread that prints its output, and the last lines of that output."""

    process: Process
    popen: subprocess.Popen[bytes]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    unread: bool = False

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._forward, daemon=True)
        self.reader.start()

    def _forward(self) -> None:
        assert self.popen.stdout is not None
        for raw in self.popen.stdout:
            # A progress bar rewrites its line: only its last state is shown.
            line = raw.decode(errors="replace").rstrip("\r\n").rsplit("\r", 1)[-1]
            self.last_lines.append(line)
            try:
                with _print_lock:
                    sys.stdout.write(f"[{self.process.name}, {self.process.node}] {line}\n")
                    sys.stdout.flush()
            except BrokenPipeError:  # `emulate ... | head` reads no more
                self.unread = True
                return

    def is_alive(self) -> bool:
        """Whether the process or anything in its process group still runs."""
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
    """Start the processes, wait until all have succeeded or one has failed, and end those that still run.

    Each process gets a session of its own. So a Ctrl-C reaches it only through this process, and whatever it starts
    ends with it. A power cut kills a node if it still runs then; after that the other processes are ended.
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
            _ignore_signals()
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
            # Discard further output: its reader is gone, and Python would complain about that at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return Outcome(128 + signal.SIGPIPE)
        time.sleep(_POLL_SECONDS)


def _failure(one: _Running, code: int) -> Outcome:
    one.reader.join(timeout=2)  # its last output says why it failed
    reason = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    exit_code = code if code > 0 else 128 - code
    return Outcome(exit_code, f"{one.process.name} ({one.process.node})", reason, tuple(one.last_lines))


def _end(running: Sequence[_Running]) -> None:
    """End every process and its process group: with SIGTERM first, with SIGKILL after a grace period."""
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
    """Let SIGINT and SIGTERM end the wait, once; afterwards they are ignored while the processes are ended."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        _ignore_signals()
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


def _ignore_signals() -> None:
    if _in_main_thread():
        for each in _ENDING_SIGNALS:
            signal.signal(each, signal.SIG_IGN)


def _in_main_thread() -> bool:
    """Whether this is the main thread, the only one where Python allows signal handlers."""
    return threading.current_thread() is threading.main_thread()
