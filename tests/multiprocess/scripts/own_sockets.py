"""The TCP connections of this process, whatever its other threads open and close meanwhile."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple


class Connection(NamedTuple):
    """A copy of its descriptor, closed after its turn; the ports of both ends; what the kernel calls it."""

    socket: socket.socket
    ports: tuple[int, int]
    inode: str


def own_connections() -> Iterator[Connection]:
    """Each that leads to another end, once.

    Other threads close sockets and make copies of them, as the counters of links do. So a descriptor is copied before
    it is looked at, and a connection is known by its inode: it counts once however many descriptors lead to it.
    """
    seen = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            number = os.dup(int(name))
        except OSError:  # it has been closed since
            continue
        inode = os.readlink(f"/proc/self/fd/{number}")
        if inode in seen or not inode.startswith("socket:"):
            os.close(number)
            continue
        seen.add(inode)
        with socket.socket(fileno=number) as copy:
            ports = _ports(copy)
            if ports:
                yield Connection(copy, ports, inode)


def _ports(one: socket.socket) -> tuple[int, int] | None:
    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
        with suppress(OSError):  # it listens, or its other end is gone
            return one.getsockname()[1], one.getpeername()[1]
    return None
