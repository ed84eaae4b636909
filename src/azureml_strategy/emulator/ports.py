"""A port that is one emulated job's own, for as long as it runs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from azureml_strategy.cluster.environ import BATCH_PORT, DEFAULT_PORT


@contextmanager
def reserved_port(preferred: int = DEFAULT_PORT) -> Iterator[int]:
    """Azure ML's own port where it is free, as it always is on a node of one's own, else any other.

    A second emulated job cannot have it meanwhile, and rank 0 of this one can listen on it: the socket that holds it
    is exclusive when it takes the port and shares it afterwards, with sockets that are marked reusable as torch's
    store is (socket(7), SO_REUSEADDR).

    Args:
        preferred: the port to take where it is free.
    """
    with _hold(preferred) as holder:
        yield int(holder.getsockname()[1])


def _hold(preferred: int) -> socket.socket:
    holder = _bound(preferred) or _bound(0)
    while holder is None or holder.getsockname()[1] == BATCH_PORT:
        holder = _bound(0)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def _bound(port: int) -> socket.socket | None:
    both = socket.has_dualstack_ipv6()
    holder = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
    if both:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        holder.bind(("", port))
    except OSError:  # taken
        holder.close()
        return None
    return holder
