"""What a collective takes: bytes and messages, by the links inside a node and between nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
Library = Literal["nccl", "gloo"]

# Bytes that each link carries, of the whole tensor's, in a ring of p: all-reduce 2 (p - 1) / p, the others (p - 1) / p
# (nccl-tests, doc/PERFORMANCE.md). Messages one after the other: 2 (p - 1) and p - 1.
_ROUNDS: dict[Collective, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
# NCCL's own model gives trees 0.92 of a ring's bandwidth at most between nodes (src/graph/tuning.cc).
_TREE = 0.92


@dataclass(frozen=True)
class Tier:
    """A kind of link.

    Attributes:
        name: such as `NVLink 4` or `InfiniBand`.
        bandwidth: bytes per second: the bus bandwidth, as nccl-tests reports it, that large messages reach.
        latency_s: seconds for a message over one link.
        slowdown: the share by which computation is slower while this carries traffic, 0 to below 1.
    """

    name: str
    bandwidth: float
    latency_s: float
    slowdown: float = 0.0


@dataclass(frozen=True)
class Fabric:
    """Processes and what joins them.

    Attributes:
        nodes: number of nodes.
        per_node: processes on each, one a GPU.
        inside: what joins those of one node.
        across: what joins nodes; all processes of a node share it.
        library: what sends. torch's gloo, on CPUs, knows no trees, and its reduce-scatter is an all-reduce.
    """

    nodes: int
    per_node: int
    inside: Tier
    across: Tier
    library: Library = "nccl"

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.nodes * self.per_node

    @property
    def slowest(self) -> Tier:
        """The tier that bounds a collective of all."""
        if self.nodes == 1:
            return self.inside
        return min(self.inside, self.across, key=lambda tier: tier.bandwidth) if self.per_node > 1 else self.across

    def inside_node(self, size: int) -> Fabric:
        """The group of so many neighbours: inside a node, or over several whole nodes."""
        if size <= self.per_node:
            return replace(self, nodes=1, per_node=size)
        return replace(self, nodes=math.ceil(size / self.per_node))

    def every(self, step: int) -> Fabric:
        """The group of every `step`-th process, as data-parallel groups are beside tensor-parallel ones of that size.

        All such groups of a node are busy at the same time and share what joins the nodes.
        """
        if step <= self.per_node:
            return replace(self, per_node=self.per_node // step, across=_shared(self.across, step))
        return Fabric(self.size // step, 1, self.inside, _shared(self.across, self.per_node), self.library)

    def collective_s(self, kind: Collective, size_bytes: float) -> float:
        """Seconds of a collective of all processes over a tensor of so many bytes, counted whole.

        A ring costs `rounds (p - 1) / p x bytes / bandwidth` and a latency for each of its messages. For all-reduce,
        NCCL takes a tree where that is faster: `2 log2(nodes)` messages between nodes.
        """
        if self.size == 1 or not size_bytes:
            return 0.0
        if self.library == "gloo" and kind == "reduce_scatter":
            kind = "all_reduce"
        rounds, tier = _ROUNDS[kind], self.slowest
        crossing = min(self.nodes, self.size - 1) if self.nodes > 1 else 0
        hops_s = crossing * self.across.latency_s + (self.size - 1 - crossing) * self.inside.latency_s
        ring = rounds * ((self.size - 1) / self.size * size_bytes / tier.bandwidth + hops_s)
        if kind != "all_reduce" or self.nodes < 2 or self.library == "gloo":
            return ring
        depth = math.ceil(math.log2(self.nodes))
        tree = 2 * (depth * self.across.latency_s + (self.per_node - 1) * self.inside.latency_s)
        return min(ring, tree + 2 * size_bytes / (_TREE * tier.bandwidth))

    def send_s(self, size_bytes: float, *, across: bool) -> float:
        """Seconds to send so many bytes to a neighbour, inside the node or in another one."""
        tier = self.across if across else self.inside
        return tier.latency_s + size_bytes / tier.bandwidth


def _shared(tier: Tier, groups: int) -> Tier:
    return replace(tier, bandwidth=tier.bandwidth / groups)
