"""Measures this process's TCP connections to other nodes, by what the kernel counts for each of them.

A connection is busy while bytes that it has sent are under way. On equal links, ranks that exchange gradients in a ring
are busy equally long. The one whose link is slow is busy longer, while the others wait for what comes through it.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import NamedTuple

# struct tcp_info in linux/tcp.h: tcpi_busy_time and tcpi_rwnd_limited, in microseconds.
_BUSY_TIME = struct.Struct("=QQ")
_BUSY_TIME_AT = 168
_LENGTH = _BUSY_TIME_AT + _BUSY_TIME.size


class Link(NamedTuple):
    """What a process has sent to an address so far.

    Attributes:
        busy_s: seconds in which bytes were under way, without those in which the other end took no more.
        own: address at this end.
    """

    busy_s: float
    own: str


def read_links(leave_out: frozenset[int] = frozenset()) -> dict[str, Link]:
    """The connections of this process by the address at their other end; empty on other systems than Linux.

    Of several to one address, which share the link, the busiest counts.

    Args:
        leave_out: ports at the other end that do not count, such as the store's.
    """
    links: dict[str, Link] = {}
    for number in _sockets():
        with suppress(OSError, struct.error):  # it has been closed since, or is no connection
            peer, link = _read(number, leave_out)
            if peer and (peer not in links or link.busy_s > links[peer].busy_s):
                links[peer] = link
    return links


def _sockets() -> list[int]:
    found = []
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.append(int(name))
    return found


def _read(number: int, leave_out: frozenset[int]) -> tuple[str, Link]:
    # A copy of the descriptor, so that closing this object leaves the connection alone.
    with socket.socket(fileno=os.dup(number)) as connection:
        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
        peer = connection.getpeername() if is_tcp else ("", 0)
        if not peer[0] or peer[1] in leave_out:
            return "", Link(0.0, "")
        own = connection.getsockname()[0]
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
    busy_us, full_us = _BUSY_TIME.unpack_from(info, _BUSY_TIME_AT)
    return _plain(peer[0]), Link((busy_us - full_us) / 1e6, _plain(own))


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:").partition("%")[0]
