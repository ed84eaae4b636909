"""Measures this process's TCP connections to other nodes, by what the kernel counts for each of them.

A connection is busy while bytes that it has sent are under way. On equal links, ranks that exchange gradients in a ring
are busy equally long. The one whose link is slow is busy longer, while the others wait for what comes through it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple

# struct tcp_info in linux/tcp.h: tcpi_busy_time and tcpi_rwnd_limited, in microseconds.
_BUSY_TIME = struct.Struct("=QQ")
_BUSY_TIME_AT = 168
_LENGTH = _BUSY_TIME_AT + _BUSY_TIME.size
# struct sockaddr_in6, the longer one: family, port, flow, 16 bytes of address, scope.
_ADDRESS_LENGTH = 28


class Link(NamedTuple):
    """What a process has sent to an address so far.

    Attributes:
        busy_s: seconds in which bytes were under way, without those in which the other end took no more.
        own: address at this end.
    """

    busy_s: float
    own: str


def read_links(leave_out: frozenset[int] = frozenset()) -> dict[str, Link]:
    """The connections of this process to other machines by the address there; empty on other systems than Linux.

    Of several to one address, which share the link, the busiest counts. A connection within this machine crosses no
    network, so that a loaded machine alone makes it slow. Neither counts one to a port of `leave_out`, such as the
    store's.
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


# Python's own socket objects would change the sockets of others: where the script has called setdefaulttimeout, making
# one sets O_NONBLOCK, which a copy of a descriptor shares with the original. So the C library is asked itself.
def _read(number: int, leave_out: frozenset[int]) -> tuple[str, Link]:
    library = ctypes.CDLL(None)
    peer, port = _address(library.getpeername, number)
    own, _ = _address(library.getsockname, number)
    if not peer or port in leave_out or peer == own or ip_address(peer).is_loopback:
        return "", Link(0.0, "")
    info, length = ctypes.create_string_buffer(_LENGTH), ctypes.c_uint32(_LENGTH)
    if library.getsockopt(number, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(length)):
        return "", Link(0.0, "")  # a UNIX socket, or UDP
    busy_us, full_us = _BUSY_TIME.unpack_from(info.raw[: length.value], _BUSY_TIME_AT)
    return peer, Link((busy_us - full_us) / 1e6, own)


def _address(ask: Callable[..., int], number: int) -> tuple[str, int]:
    """The address and port at one end of a socket; an empty address if it has none, or is of another family."""
    buffer, length = ctypes.create_string_buffer(_ADDRESS_LENGTH), ctypes.c_uint32(_ADDRESS_LENGTH)
    if ask(number, buffer, ctypes.byref(length)):
        return "", 0
    raw = buffer.raw
    family, port = struct.unpack_from("=H", raw)[0], struct.unpack_from("!H", raw, 2)[0]
    found = {socket.AF_INET: raw[4:8], socket.AF_INET6: raw[8:24]}.get(family)
    return ("", 0) if found is None else (socket.inet_ntop(family, found).removeprefix("::ffff:"), port)
