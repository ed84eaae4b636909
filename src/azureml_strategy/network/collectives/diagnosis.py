"""Which node or link is slow, from the bandwidths of all pairs of nodes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

Pair = tuple[int, int]
# Below this share of the usual bandwidth a pair counts as slow. Healthy pairs of one cluster differ by less:
# published two-node runs on ND H100 v5 range from 442 to 467 GB/s.
SLOW = 0.8


@dataclass(frozen=True)
class Diagnosis:
    """What the pairs say.

    Attributes:
        usual: bus bandwidth that a healthy pair has, in GB/s; None where there is nothing to go by.
        threshold: below it a pair is slow, in GB/s.
        slow_nodes: nodes all of whose pairs are slow.
        slow_links: slow pairs of nodes that are not slow themselves.
    """

    usual: float | None
    threshold: float | None
    slow_nodes: tuple[int, ...]
    slow_links: tuple[Pair, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing is slow."""
        return not (self.slow_nodes or self.slow_links)


def diagnose(bandwidths: Mapping[Pair, float], expected: float | None = None) -> Diagnosis:
    """Tell slow nodes from slow links.

    The usual bandwidth is the median over the nodes of each one's best pair. The median over the pairs would not do:
    one slow node of three spoils two of the three pairs, but no healthy node's best one. So up to half of the nodes
    may be slow. Two nodes have nothing to be compared with but `expected`.

    Args:
        bandwidths: bus bandwidth of each pair of nodes in GB/s, all pairs of two nodes or more, each once.
        expected: what a pair must reach, in GB/s; used for two nodes only.
    """
    nodes = sorted({node for pair in bandwidths for node in pair})
    usual = expected if len(nodes) == 2 else _usual(bandwidths, nodes)
    if usual is None:
        return Diagnosis(None, None, (), ())
    slow = {pair for pair, bandwidth in bandwidths.items() if bandwidth < SLOW * usual}
    slow_nodes = () if len(nodes) == 2 else tuple(node for node in nodes if _pairs(bandwidths, node) <= slow)
    links = tuple(sorted(pair for pair in slow if not set(pair) & set(slow_nodes)))
    return Diagnosis(usual, SLOW * usual, slow_nodes, links)


def _usual(bandwidths: Mapping[Pair, float], nodes: list[int]) -> float:
    best = [max(bandwidths[pair] for pair in _pairs(bandwidths, node)) for node in nodes]
    return statistics.median_high(best)


def _pairs(bandwidths: Mapping[Pair, float], node: int) -> set[Pair]:
    return {pair for pair in bandwidths if node in pair}
