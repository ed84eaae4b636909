"""The end of a channel line, behind `via`: which way one connection of NCCL takes."""

from __future__ import annotations

import re
from typing import NamedTuple

# net.cc writes NET/<network>/<device>[(<proxy rank>)][/GDRDMA[(PCI)]][/Shared], coll_net.cc COLLNET/SHARP/<device>.
# The device must be there: without it the line was cut off, perhaps within the network's name.
_NETWORK = re.compile(r"(COLL)?NET/([^/]{1,64})/(\d{1,6})(\(\d+\))?")
# p2p.cc and shm.cc; RCCL adds ` comm 0x... nRanks N` behind them.
_LOCAL = re.compile(
    r"P2P/(?:direct pointer|indirect|[A-Z]{1,16})(?:/read)?(?:/CE)?"
    r"|SHM/[a-zA-Z]{1,16}(?:/[a-zA-Z]{1,16})?|direct shared memory"
)


class Route(NamedTuple):
    """One way between two ranks.

    Attributes:
        name: `NET/IB`, `COLLNET/SHARP`, or a way inside the node such as `P2P/IPC/read`.
        network: the network's name; None inside a node.
        device: index of the network device; None inside a node.
        gpudirect: the adapter reads and writes GPU memory.
        proxied: another GPU of the node, closer to the adapter, passes the data on (PXN).
        collnet: the switches reduce (SHARP).
    """

    name: str
    network: str | None = None
    device: int | None = None
    gpudirect: bool = False
    proxied: bool = False
    collnet: bool = False


def parse_route(text: str) -> Route | None:
    """The route of what stands behind `via`; None if it is none."""
    if network := _NETWORK.match(text):
        name = network[2].strip()
        return Route(
            name=f"{'COLLNET' if network[1] else 'NET'}/{name}",
            network=name,
            device=int(network[3]),
            gpudirect="/GDRDMA" in text,
            proxied=network[4] is not None,
            collnet=network[1] is not None,
        )
    local = _LOCAL.match(text)
    return Route(local[0]) if local else None
