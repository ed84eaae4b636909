"""Whether a process of the same machine still runs: the kernel knows at once, and for certain."""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path


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
    """

    rank: int
    node: int
    host: str
    processes: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}, host {self.host})"


def this_process(rank: int, node: int) -> Member:
    """This process, as a member of the job.

    Args:
        rank: its global rank.
        node: the index of its node.
    """
    status = _status(os.getpid())
    return Member(rank, node, socket.gethostname(), _table(), os.getpid(), status[1] if status else "")


def is_gone(member: Member) -> bool:
    """Whether the process has ended, for certain; False for one on another machine.

    Args:
        member: whose process.
    """
    # Two machines that cannot name their tables do not share one.
    if not member.started or not member.processes or member.processes != _table():
        return False
    status = _status(member.pid)
    # A zombie has ended, too; whoever started it has not looked yet.
    return status is None or status[0] in "ZX" or status[1] != member.started


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
