"""The bandwidth between each two nodes of a job."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from azureml_strategy.network.collectives.diagnosis import Pair
from azureml_strategy.network.collectives.measure import Procedure, measure
from azureml_strategy.network.collectives.operations import COLLECTIVES
from azureml_strategy.network.collectives.place import Place


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
