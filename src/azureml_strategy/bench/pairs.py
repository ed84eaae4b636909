"""The bandwidth between every two nodes, and the slow node or link that explains it."""

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
# Below this share of the usual bandwidth a pair counts as slow. Healthy pairs of one cluster differ by less:
# published two-node runs on ND H100 v5 range from 442 to 467 GB/s.
SLOW = 0.8


@dataclass(frozen=True)
class PairBandwidths:
    """All-reduce between each two nodes.

    Attributes:
        bus_bandwidth: of each pair of nodes, in GB/s.
        wrong: pairs that computed a wrong sum.
    """

    bus_bandwidth: dict[Pair, float]
    wrong: tuple[Pair, ...]


def tournament(nodes: int) -> list[list[Pair]]:
    """Rounds in which every two nodes meet once and no node is in two pairs: the circle method of sports schedules.

    With an odd number of nodes one rests in each round.
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
    """All-reduce over all processes of two nodes, for every two nodes. Every process of the job must call it.

    The pairs of a round are measured at the same time, so that n nodes take n rounds and not n * (n - 1) / 2. They
    share no node, hence no adapter; they share switches, as they do in training.

    Args:
        place: this process among all.
        nodes: nodes of the job, each with the same number of processes, in order of rank.
        size: message size in bytes.
        procedure: how to measure.
        timeout: of the pairs' process groups.

    Raises:
        Unavailable: the backend has no all-reduce for this data type.
    """
    pairs = list(itertools.combinations(range(nodes), 2))
    # One position for each pair, which its first process fills and no other: the sum over the job is the whole.
    bandwidths, wrong = [0.0] * len(pairs), [0.0] * len(pairs)
    for played in tournament(nodes):
        for pair in played:
            inside = _enter(place, pair, nodes, timeout)
            if inside:
                found = measure(COLLECTIVES["all-reduce"], inside, size, procedure)
                dist.destroy_process_group(inside.group)
                bandwidths[pairs.index(pair)] = found.bus_bandwidth * (inside.rank == 0)
                wrong[pairs.index(pair)] = found.wrong * (inside.rank == 0)
        place.meet()
    bandwidths, wrong = place.total(bandwidths), place.total(wrong)
    return PairBandwidths(
        dict(zip(pairs, bandwidths, strict=True)),
        tuple(pair for pair, count in zip(pairs, wrong, strict=True) if count),
    )


def _enter(place: Place, pair: Pair, nodes: int, timeout: timedelta) -> Place | None:
    """This process's place in a group of two nodes; None if its node is neither."""
    processes = place.world_size // nodes
    ranks = [node * processes + local_rank for node in pair for local_rank in range(processes)]
    if place.rank not in ranks:
        return None
    group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    return Place(ranks.index(place.rank), len(ranks), place.device, group)


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
