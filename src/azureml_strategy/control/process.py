"""Whether a process still lives: a kernel knows at once, and for certain. Ours is asked, or another machine's."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# `unreachable`: its machine does not answer. `unknown`: there is no way to ask.
Sight = Literal["alive", "gone", "unreachable", "unknown"]
# For another machine to answer; two lost packets take three seconds.
_ASK_SECONDS = 5.0
_MOST_ASKING = 128
_STOPPED, _WAITS = "stopped by a signal or a debugger", "waiting for a disk or a driver"
_STATES = {"T": _STOPPED, "t": _STOPPED, "D": _WAITS}


@dataclass(frozen=True)
class Member:
    """A rank's process, as it introduces itself to the others.

    Attributes:
        rank: its global rank.
        node: the index of its node.
        host: the name of its machine.
        processes: names the table of processes that it is in: the same for two that can see each other.
        pid: its number there.
        started: when it started, by the kernel's clock: numbers are used again.
        address: where its kernel can be asked for it, see `answering_port`; empty where it cannot.
        port: the same.
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
    """This process, as a member of the job.

    Args:
        rank: its global rank.
        node: the index of its node.
        address: this machine's, at which other machines may ask for the process; empty for none.
    """
    status = _status(os.getpid())
    port = answering_port(address) if address else 0
    return Member(
        rank,
        node,
        socket.gethostname(),
        _table(),
        os.getpid(),
        status[1] if status else "",
        address if port else "",
        port,
    )


def address_towards(host: str, port: int) -> str:
    """This machine's address as another one sees it; connecting a datagram socket sends nothing.

    Args:
        host: the other's name or address.
        port: any of its ports.

    Returns:
        Empty where there is no way to it.
    """
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def answering_port(address: str) -> int:
    """A port at which the kernel answers as long as this process lives, whatever its threads do; 0 if there is none.

    Nothing is ever read from it or sent. A child that is forked closes its copy.

    Args:
        address: the only one of this machine at which it answers.
    """
    listening = _listening(address)
    return int(listening.getsockname()[1]) if listening is not None else 0


def let_in(member: Member) -> None:
    """Close the connections of those that have asked for this process: the kernel keeps so many and no more.

    Args:
        member: this process.
    """
    listening = _listening(member.address) if member.port else None
    with contextlib.suppress(OSError):
        while listening is not None:
            listening.accept()[0].close()


def look_for(member: Member) -> Sight:
    """Whether a process lives.

    Args:
        member: whose process.
    """
    if is_seen(member):
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


def why_silent(member: Member, sight: Sight) -> str:
    """What is known of a process that says nothing.

    Args:
        member: whose process.
        sight: from `look_for`.
    """
    if sight == "unreachable":
        return "its machine does not answer either"
    if sight != "alive":
        return "whether its process is alive cannot be asked from here"
    status = _status(member.pid) if is_seen(member) else None
    state = _STATES.get(status[0]) if status else None
    held = "its Python does not run, as while native code holds Python's lock (GIL)"
    return f"its process {member.pid} is alive, {state}" if state else f"its process {member.pid} is alive, but {held}"


def is_gone(member: Member) -> bool:
    """Whether the process has ended, for certain; False for one on another machine.

    Args:
        member: whose process.
    """
    if not is_seen(member):
        return False
    status = _status(member.pid)
    # A zombie has ended, too; whoever started it has not looked yet.
    return status is None or status[0] in "ZX" or status[1] != member.started


def is_seen(member: Member) -> bool:
    """Whether this machine's kernel knows of the process.

    Args:
        member: whose process.
    """
    # Two machines that cannot name their tables do not share one.
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
    """Boot and PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _status(pid: int) -> tuple[str, str] | None:
    """State and start time of a process, see proc_pid_stat(5); None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], fields[19]
