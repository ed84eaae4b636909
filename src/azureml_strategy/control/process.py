"""Checks whether a process is alive, by asking the kernel of its machine, which knows at once and for certain.

This machine's kernel is asked through /proc. Another machine's kernel is asked by connecting to a port of the process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# `unreachable`: the machine of the process does not answer. `unknown`: there is no way to ask.
Liveness = Literal["alive", "gone", "unreachable", "unknown"]
# Time for another machine to answer. Two lost packets cost three seconds.
_ASK_SECONDS = 5.0
_MOST_ASKING = 128
_STOPPED, _WAITS = "stopped by a signal or a debugger", "waiting for a disk or a driver"
_STATES = {"T": _STOPPED, "t": _STOPPED, "D": _WAITS}


@dataclass(frozen=True)
class Member:
    """A rank's process, with all that other ranks need to check whether it is alive.

    Attributes:
        rank: global rank.
        node: index of its node.
        host: name of its machine.
        processes: identifies its process table. Two processes with the same value can see each other.
        pid: process id in that table.
        started: start time by the kernel's clock, because process ids are reused.
        address: at which other machines ask its kernel, see `answering_port`; empty if they cannot.
        port: at that address; 0 if they cannot.
    """

    rank: int
    node: int
    host: str
    processes: str
    pid: int
    started: str
    address: str = ""
    port: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}, host {self.host})"


def this_process(rank: int, node: int, address: str = "") -> Member:
    """Return this process as a member of the job. Other machines can check it at the address, if there is one."""
    pid = os.getpid()
    status = _status(pid)
    port = answering_port(address) if address else 0
    started = status[1] if status else ""
    return Member(rank, node, socket.gethostname(), _table(), pid, started, address if port else "", port)


def address_towards(host: str, port: int) -> str:
    """Return this machine's address as another machine sees it; empty if there is no route to it.

    It sends nothing: it only connects a datagram socket, so `port` may be any.
    """
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def answering_port(address: str) -> int:
    """Return a port at which the kernel answers while this process lives, whatever its threads do; 0 if none can open.

    The process never reads or sends anything there. A forked child closes its copy, so that the port closes with this
    process. The port is open at no other address of this machine.
    """
    listening = _listening(address)
    return int(listening.getsockname()[1]) if listening is not None else 0


def accept_probes(member: Member) -> None:
    """Close the connections of ranks that have checked this process, because the kernel's queue for them is limited."""
    listening = _listening(member.address) if member.port else None
    with contextlib.suppress(OSError):
        while listening is not None:
            listening.accept()[0].close()


def check_liveness(member: Member) -> Liveness:
    """Check whether a process is alive."""
    if shares_process_table(member):
        return "gone" if is_gone(member) else "alive"
    if not member.port:
        return "unknown"
    try:
        socket.create_connection((member.address, member.port), _ASK_SECONDS).close()
    except ConnectionRefusedError:
        return "gone"
    except OSError:
        return "unreachable"
    return "alive"


def why_silent(member: Member, liveness: Liveness) -> str:
    """Describe what is known of a process without heartbeats."""
    if liveness == "unreachable":
        return "its machine does not answer either"
    if liveness != "alive":
        return "whether its process is alive cannot be asked from here"
    status = _status(member.pid) if shares_process_table(member) else None
    state = _STATES.get(status[0]) if status else None
    held = "its Python does not run, as while native code holds Python's lock (GIL)"
    return f"its process {member.pid} is alive, {state}" if state else f"its process {member.pid} is alive, but {held}"


def is_gone(member: Member) -> bool:
    """Whether the process has certainly ended. Always False for a process that this machine's kernel cannot see."""
    if not shares_process_table(member):
        return False
    status = _status(member.pid)
    # A zombie has ended too: its parent has only not collected its exit status yet.
    return status is None or status[0] in "ZX" or status[1] != member.started


def shares_process_table(member: Member) -> bool:
    """Whether the process is in this process's own process table, so that /proc shows it."""
    # Two processes that cannot identify their tables have empty values, and need not share a table.
    return bool(member.started and member.processes) and member.processes == _table()


@functools.cache
def _listening(address: str) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listening = socket.create_server((address, 0), family=family, backlog=_MOST_ASKING)
    except OSError:
        return None
    listening.setblocking(False)
    os.register_at_fork(after_in_child=listening.close)
    return listening


@functools.cache
def _table() -> str:
    """Boot id and PID namespace, which identify a process table; empty if they cannot be read."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _status(pid: int) -> tuple[str, str] | None:
    """State and start time of a process, see proc_pid_stat(5); None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may contain anything
    return fields[0], fields[19]
