"""Results made by hand, and a process group of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from azureml_strategy.bench.collectives import Place
from azureml_strategy.bench.measure import Measurement, PairBandwidths, diagnose
from azureml_strategy.bench.results import Conditions, Expectation, Pairs, Results, Sweep, judge
from azureml_strategy.network.record import NodeRecord, RunNetwork

Pair = tuple[int, int]
CONDITIONS = Conditions(
    backend="gloo",
    dtype="float32",
    nodes=3,
    processes_per_node=1,
    device="CPU",
    vm_size=None,
    iterations=10,
    warmup=2,
    torch="2.13.0",
    nccl=None,
)


def row(collective: str, size: int, bus_bandwidth: float, wrong: int = 0) -> Measurement:
    seconds = size / bus_bandwidth / 1e9
    return Measurement(collective, size, seconds, seconds, seconds, seconds, bus_bandwidth, bus_bandwidth, 100, wrong)


def node(rank: int) -> NodeRecord:
    return NodeRecord(rank, f"host-{rank}", None, [], [], [], [], "unknown", None, [], "sockets on eth0", [])


def network(nodes: int) -> RunNetwork:
    return RunNetwork("gloo", [node(rank) for rank in range(nodes)])


@pytest.fixture
def sweep() -> Results:
    """Two collectives at two sizes each, one wrong at one, and one that the backend does not have."""
    right = [row("all-reduce", 1 << 20, 0.1), row("all-reduce", 64_000_000, 0.12)]
    measured = Sweep(
        [*right, row("broadcast", 64_000_000, 0.11, wrong=3)],
        {"all-to-all": "Backend gloo does not support alltoall_base"},
    )
    verdict = judge(0.12, Expectation(0.125, "as --expect says"), in_ring=True)
    return Results(CONDITIONS, measured, verdict, network(3))


MakePairs = Callable[..., Results]


@pytest.fixture
def pairs() -> MakePairs:
    def make(
        bandwidths: dict[tuple[int, int], float], *wrong: tuple[int, int], expected: float | None = None
    ) -> Results:
        measured = Pairs(1 << 24, PairBandwidths(bandwidths, wrong), diagnose(bandwidths, expected))
        nodes = 1 + max(node for pair in bandwidths for node in pair)
        return Results(replace(CONDITIONS, nodes=nodes), measured, None, network(nodes))

    return make


@pytest.fixture
def alone() -> Iterator[Place]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Place(0, 1, torch.device("cpu"))
    dist.destroy_process_group()
