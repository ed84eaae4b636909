"""Measures the bandwidth between every two nodes, and finds slow nodes and links."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from azureml_strategy.bench.collectives import COLLECTIVES, Place
from azureml_strategy.bench.measure import Procedure, measure

Pair = tuple[int, int]
# A pair counts as slow below this share of the usual bandwidth. Healthy pairs of one cluster differ by less: published
# two-node runs on ND H100 v5 range from 442 to 467 GB/s.
SLOW = 0.8


@dataclass(frozen=True)
class PairBandwidths:
    """The bandwidth of all-reduce between every two nodes.

    Attributes:
        bus_bandwidth: bus bandwidth of each pair of nodes, in GB/s.
        wrong: pairs that computed a wrong sum.
    """

    bus_bandwidth: dict[Pair, float]
    wrong: tuple[Pair, ...]


def tournament(nodes: int) -> list[list[Pair]]:
    """Return rounds of pairs by the circle method of sports schedules.

    Over all rounds every two nodes meet once; in one round no node is in two pairs. With an odd number of nodes, one
    node rests in each round.
    """
    circle: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def measure_pairs(place: Place, nodes: int, size: int, procedure: Procedure, timeout: timedelta) -> PairBandwidths:
    """Measure all-reduce over all processes of two nodes, for every two nodes. Every process of the job must call it.

    The pairs of a round are measured at the same time, so n nodes take at most n rounds, not n * (n - 1) / 2. They
    share no node, and so no adapter. They share switches, as in training.

    Args:
        place: this process in the group of all processes.
        nodes: number of nodes, each with the same number of processes, in order of rank.
        size: message size in bytes.
        procedure: how to measure.
        timeout: time-out of the pairs' process groups.

    Raises:
        Unavailable: the backend has no all-reduce for this data type.
    """
    pairs = list(itertools.combinations(range(nodes), 2))
    # One position for each pair. Only the first process of the pair fills it, so the sum over the job has all values.
    bandwidths, wrong = [0.0] * len(pairs), [0.0] * len(pairs)
    for disjoint_pairs in tournament(nodes):
        for pair in disjoint_pairs:
            in_pair = _join_pair(place, pair, nodes, timeout)
            if in_pair:
                found = measure(COLLECTIVES["all-reduce"], in_pair, size, procedure)
                dist.destroy_process_group(in_pair.group)
                bandwidths[pairs.index(pair)] = found.bus_bandwidth * (in_pair.rank == 0)
                wrong[pairs.index(pair)] = found.wrong * (in_pair.rank == 0)
        place.barrier()
    bandwidths, wrong = place.total(bandwidths), place.total(wrong)
    return PairBandwidths(
        dict(zip(pairs, bandwidths, strict=True)),
        tuple(pair for pair, count in zip(pairs, wrong, strict=True) if count),
    )


def _join_pair(place: Place, pair: Pair, nodes: int, timeout: timedelta) -> Place | None:
    """Return this process's place in a new group of two nodes; None if its node is neither."""
    processes = place.world_size // nodes
    ranks = [node * processes + local_rank for node in pair for local_rank in range(processes)]
    if place.rank not in ranks:
        return None
    group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    return Place(ranks.index(place.rank), len(ranks), place.device, group)


@dataclass(frozen=True)
class Diagnosis:
    """Slow nodes and links, found from the bandwidths of the pairs.

    Attributes:
        usual: bus bandwidth of a healthy pair in GB/s; None if it is not known.
        threshold: bus bandwidth in GB/s below which a pair is slow; None if `usual` is None.
        slow_nodes: nodes of which all pairs are slow.
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

    The usual bandwidth is the median, over the nodes, of each node's best pair. The median over the pairs would not
    work: one slow node of three spoils two of the three pairs, but not the best pair of a healthy node. So up to half
    of the nodes may be slow. Two nodes can only be compared with `expected`.

    Args:
        bandwidths: bus bandwidth in GB/s of every pair of two or more nodes, each pair once.
        expected: bandwidth that a pair must reach, in GB/s; used only for two nodes.
    """
    nodes = sorted({node for pair in bandwidths for node in pair})
    best = [max(bandwidths[pair] for pair in _pairs_of(bandwidths, node)) for node in nodes]
    usual = expected if len(nodes) == 2 else statistics.median_high(best)
    if usual is None:
        return Diagnosis(None, None, (), ())
    slow = {pair for pair, bandwidth in bandwidths.items() if bandwidth < SLOW * usual}
    slow_nodes = () if len(nodes) == 2 else tuple(node for node in nodes if _pairs_of(bandwidths, node) <= slow)
    links = tuple(sorted(pair for pair in slow if not set(pair) & set(slow_nodes)))
    return Diagnosis(usual, SLOW * usual, slow_nodes, links)


def _pairs_of(bandwidths: Mapping[Pair, float], node: int) -> set[Pair]:
    return {pair for pair in bandwidths if node in pair}
