"""Measures time and bandwidth of one collective at one message size, and between every two nodes."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from azureml_strategy.bench.collectives import COLLECTIVES, Collective, Place, check

# Messages with which c10d's Backend ("Backend gloo does not support ..."), gloo and NCCL refuse an operation or dtype.
_REFUSAL = re.compile(r"not support|unsupported|invalid scalar type", re.I)
Pair = tuple[int, int]
# A pair counts as slow below this share of the usual bandwidth. Healthy pairs of one cluster differ by less: published
# two-node runs on ND H100 v5 range from 442 to 467 GB/s.
SLOW = 0.8


@dataclass(frozen=True)
class Procedure:
    """The data type of the elements, the number of timed runs, and the number of runs before these."""

    dtype: torch.dtype
    iterations: int
    warmup: int


@dataclass(frozen=True)
class Measurement:
    """The measurement of one collective at one message size. Bandwidths are for the median time, in GB/s (10^9 bytes).

    Attributes:
        size: message size in bytes, as nccl-tests counts it.
        median_s: median over the iterations of the slowest rank's time, in seconds; the other times are of these too.
        algorithm_bandwidth: size over time.
        bus_bandwidth: algorithm bandwidth times the collective's factor: what a link carries, whatever the number
            of ranks.
        checked: number of result elements compared on each rank.
        wrong: number of wrong elements, on the rank with the most.
    """

    collective: str
    size: int
    median_s: float
    p95_s: float
    min_s: float
    max_s: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    checked: int
    wrong: int


class Unavailable(RuntimeError):  # noqa: N818 - reads as what happened
    """The backend does not have this collective for this data type."""


def measure(collective: Collective, place: Place, size: int, procedure: Procedure) -> Measurement:
    """Check a collective, then time it. Every process of the group must call it.

    The message size, in bytes, is rounded down to a whole number of elements for each rank, but at least one.

    Raises:
        Unavailable: the backend refuses the collective. All processes raise it.
    """
    dtype = procedure.dtype
    total = max(1, size // dtype.itemsize // place.world_size) * place.world_size
    sent, received = collective.buffers(total, place, dtype)
    try:
        found = check(collective, sent, received, total, place)
    except RuntimeError as error:
        if not _REFUSAL.search(str(error)):
            raise
        raise Unavailable(str(error)) from error
    sent.zero_()  # repeated sums in place would grow to infinity
    seconds = _time(lambda: collective.run(sent, received, place), place, procedure)
    median = statistics.median(seconds)
    bandwidth = total * dtype.itemsize / median / 1e9
    return Measurement(
        collective=collective.name,
        size=total * dtype.itemsize,
        median_s=median,
        p95_s=statistics.quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else median,
        min_s=min(seconds),
        max_s=max(seconds),
        algorithm_bandwidth=bandwidth,
        bus_bandwidth=bandwidth * collective.bus_factor(place.world_size),
        checked=found.checked,
        wrong=found.wrong,
    )


def _time(run: Callable[[], None], place: Place, procedure: Procedure) -> list[float]:
    """Return the slowest rank's time of each iteration: a collective ends when the last rank does."""
    seconds = []
    for _ in range(procedure.warmup + procedure.iterations):
        place.barrier()
        start = time.perf_counter()
        run()
        place.synchronize()
        seconds.append(time.perf_counter() - start)
    return place.highest(seconds[procedure.warmup :])


@dataclass(frozen=True)
class PairBandwidths:
    """The bus bandwidth of all-reduce between every two nodes, in GB/s, and the pairs that computed a wrong sum."""

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
    share no node, and so no adapter. They share switches, as in training. All nodes have the same number of processes,
    in order of rank. The size is in bytes, and the timeout is that of the pairs' process groups.

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
    """Return this process's place in a new group of two nodes; None if it runs on neither."""
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
    """Tell slow nodes from slow links by the bus bandwidth in GB/s of every pair of nodes, each pair once.

    The usual bandwidth is the median, over the nodes, of each node's best pair. The median over the pairs would not
    work: one slow node of three spoils two of the three pairs, but not the best pair of a healthy node. So up to half
    of the nodes may be slow. Two nodes have no others, so their pair is compared with `expected`, in GB/s.
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
