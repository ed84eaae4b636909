"""Parses NCCL's names of networks, adapters and the routes of channels."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeVar

from azureml_strategy.network.infiniband import natural_order

LIMIT = 1 << 13  # keys kept in a dictionary, which bounds the memory for any log

Key = TypeVar("Key")
Value = TypeVar("Value")

Kind = Literal["ib", "roce", "socket", "ofi", "p2p-only", "unknown"]
Family = Literal["verbs", "socket", "ofi"]
_FAMILIES: tuple[tuple[Family, re.Pattern[str]], ...] = (
    # `IBext` and `NCCL RDMA Plugin` are HPC-X, `gIB` is Google's RoCE; SHARP runs inside InfiniBand switches.
    ("verbs", re.compile(r"IB\b|IBext|NCCL RDMA Plugin|UCX|gIB\b|SHARP\b")),
    ("socket", re.compile(r"(?:Fast)?Socket\b")),
    ("ofi", re.compile(r"(?:AWS )?Libfabric|OFI\b", re.I)),
)
_SLOWEST_FIRST: tuple[Kind, ...] = ("socket", "ofi", "roce", "ib")
# `[0]mlx5_0:1/IB/SHARP`; a fused adapter is `[2]={[0] mlx5_0:1/IB, [1] mlx5_1:1/IB}` (NCCL 2.22, 2.23).
_ENTRY = re.compile(r"\[(\d{1,6})\](?:=\{([^}]*)|\s*([^\s\[;{]+))")
_DEVICE = re.compile(r"([^\s\[\]{},;:/]{1,64}):(?:uverbs\d+:)?\d+/(IB|RoCE)\b(/SHARP)?")
# net.cc writes NET/<network>/<device>[(<proxy rank>)][/GDRDMA[(PCI)]][/Shared], coll_net.cc COLLNET/SHARP/<device>.
# The pattern requires the device: a line without it was cut off, perhaps within the network's name.
_NETWORK = re.compile(r"(COLL)?NET/([^/]{1,64})/(\d{1,6})(\(\d+\))?")
# From p2p.cc and shm.cc; RCCL appends ` comm 0x... nRanks N`.
_LOCAL = re.compile(
    r"P2P/(?:direct pointer|indirect|[A-Z]{1,16})(?:/read)?(?:/CE)?"
    r"|SHM/[a-zA-Z]{1,16}(?:/[a-zA-Z]{1,16})?|direct shared memory"
)


def remember(kept: dict[Key, Value], key: Key, value: Value) -> None:
    """Set the key's value, unless it already has one or `LIMIT` keys are kept."""
    if len(kept) < LIMIT:
        kept.setdefault(key, value)


def count(counts: dict[Key, int], key: Key, more: int) -> None:
    """Add to the key's count. Once `LIMIT` keys are counted, ignore new keys."""
    if key in counts or len(counts) < LIMIT:
        counts[key] = counts.get(key, 0) + more


def family(network: str) -> Family | None:
    """The family of a network or plugin by its name, such as `IBext_v8`; None if the name is unknown."""
    return next((name for name, pattern in _FAMILIES if pattern.match(network)), None)


def slowest(kinds: Iterable[Kind]) -> Kind:
    """The slowest of the transports in use, which sets the pace of a collective; `unknown` if none is known."""
    return min((kind for kind in kinds if kind != "unknown"), key=_SLOWEST_FIRST.index, default="unknown")


def fastest(kinds: Iterable[Kind]) -> Kind:
    """The fastest of the transports that could be used; `unknown` if none is known."""
    return max((kind for kind in kinds if kind != "unknown"), key=_SLOWEST_FIRST.index, default="unknown")


class Devices:
    """Devices by name and by the index that channel lines use."""

    def __init__(self) -> None:
        self.links: dict[str, str | None] = {}  # link layer of each: `IB`, `RoCE`, or None if no line shows it
        self.sharp = False  # whether a device reports that its fabric aggregates (SHARP)
        self.gids = False  # whether an error showed GIDs, which NCCL prints for Ethernet links only
        self._by_index: dict[tuple[str | None, int], set[str]] = {}

    def add_list(self, host: str | None, text: str) -> bool:
        """Add the devices that a line lists; returns whether it lists any."""
        found = False
        for entry in _ENTRY.finditer(text):
            for name, link, sharp in _DEVICE.findall(entry[2] or entry[3] or ""):
                self.add_name(name, link)
                remember(self._by_index, (host, int(entry[1])), set())
                self._by_index.get((host, int(entry[1])), set()).add(link)
                self.sharp |= bool(sharp)
                found = True
        return found

    def add_name(self, name: str, link: str | None = None) -> None:
        """Add a device or each part of a fused one (`mlx5_0+mlx5_1`), with its link layer if the line shows it."""
        for part in filter(None, name.split("+")):
            if link and part in self.links:
                self.links[part] = self.links[part] or link
            remember(self.links, part, link)

    def is_ethernet(self, host: str | None = None, index: int | None = None) -> bool:
        """Whether a channel over this device runs over Ethernet; if the device is not listed, all devices decide."""
        links = self._by_index.get((host, index)) if index is not None else None
        links = links or {link for link in self.links.values() if link}
        return links == {"RoCE"} or (not links and self.gids)

    def with_link(self, *links: str | None) -> list[str]:
        """Names of the devices with one of these link layers, in natural sort order."""
        return sorted((name for name, link in self.links.items() if link in links), key=natural_order)


class Route(NamedTuple):
    """A route between two ranks: over a device of a network, or inside a node without either."""

    name: str  # `NET/IB`, `COLLNET/SHARP`, or inside the node such as `P2P/IPC/read`
    network: str | None = None
    device: int | None = None  # its index
    gpudirect: bool = False  # whether the adapter reads and writes GPU memory directly
    proxied: bool = False  # whether another GPU of the node, closer to the adapter, forwards the data (PXN)
    collnet: bool = False  # whether the switches reduce (SHARP)


def parse_route(text: str) -> Route | None:
    """Parse the text after `via`; None if it is not a route."""
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
