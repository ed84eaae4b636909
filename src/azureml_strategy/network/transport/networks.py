"""What carries the traffic of a network that NCCL names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

Kind = Literal["ib", "roce", "socket", "ofi", "p2p-only", "unknown"]
Family = Literal["verbs", "socket", "ofi"]

_FAMILIES: tuple[tuple[Family, re.Pattern[str]], ...] = (
    # `IBext` and `NCCL RDMA Plugin` are HPC-X, `gIB` is Google's RoCE; SHARP runs inside InfiniBand switches.
    ("verbs", re.compile(r"IB\b|IBext|NCCL RDMA Plugin|UCX|gIB\b|SHARP\b")),
    ("socket", re.compile(r"(?:Fast)?Socket\b")),
    ("ofi", re.compile(r"(?:AWS )?Libfabric|OFI\b", re.I)),
)
_SLOWEST_FIRST: tuple[Kind, ...] = ("socket", "ofi", "roce", "ib")


def family(network: str) -> Family | None:
    """The family of a network's or plugin's name, such as `IBext_v8`; None for a plugin that is not known."""
    return next((name for name, pattern in _FAMILIES if pattern.match(network)), None)


def slowest(kinds: Iterable[Kind]) -> Kind:
    """The slowest of the transports in use: it sets the pace of a collective. Names not known count last."""
    seen = set(kinds)
    return next((kind for kind in _SLOWEST_FIRST if kind in seen), "unknown")


def fastest(kinds: Iterable[Kind]) -> Kind:
    """The fastest of the transports that could be used."""
    seen = set(kinds)
    return next((kind for kind in reversed(_SLOWEST_FIRST) if kind in seen), "unknown")
