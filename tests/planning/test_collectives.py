"""What collectives take, beside a ring that is played step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from azureml_strategy.planning.collectives import Fabric, Tier

_GIGA = 1e9


def _fabric(nodes: int, per_node: int, inside: float = 200, across: float = 25, latency: float = 0.0) -> Fabric:
    return Fabric(
        nodes, per_node, Tier("NVLink", inside * _GIGA, latency), Tier("InfiniBand", across * _GIGA, 3 * latency)
    )


def _played_ring(size: int, size_bytes: float, bandwidth: float, rounds: int) -> float:
    """Each rank sends a p-th of the tensor to the next one, p - 1 times a round, all at the same time."""
    total = 0.0
    for _ in range(rounds):
        for _ in range(size - 1):
            total += size_bytes / size / bandwidth
    return total


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_ring_inside_a_node(size: int) -> None:
    fabric = _fabric(1, size)
    for kind, rounds in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)):
        expected = _played_ring(size, 1e8, 200 * _GIGA, rounds)
        assert fabric.collective_s(kind, 1e8) == pytest.approx(expected)  # type: ignore[arg-type]


def test_the_slowest_tier_bounds_several_nodes() -> None:
    fabric = _fabric(4, 8)
    assert fabric.collective_s("all_reduce", 1e9) == pytest.approx(_played_ring(32, 1e9, 25 * _GIGA, 2))
    assert fabric.collective_s("all_reduce", 1e9) > _fabric(1, 8).collective_s("all_reduce", 1e9)


def test_one_process_exchanges_nothing() -> None:
    assert _fabric(1, 1).collective_s("all_reduce", 1e9) == 0.0


def test_small_messages_cost_latency_and_a_tree_has_fewer_of_them() -> None:
    fabric = _fabric(64, 8, latency=5e-6)
    ring_messages = 2 * (64 * 15e-6 + (511 - 64) * 5e-6)
    tree_messages = 2 * (6 * 15e-6 + 7 * 5e-6)
    assert fabric.collective_s("all_reduce", 8) == pytest.approx(tree_messages, rel=1e-3)
    assert fabric.collective_s("all_gather", 8) == pytest.approx(ring_messages / 2, rel=1e-3)


def test_groups_of_a_tensor_parallel_job() -> None:
    fabric = _fabric(4, 8)
    shared = fabric.every(8)  # a data-parallel group has one rank of each node, and eight groups share its adapters
    assert (shared.nodes, shared.per_node, shared.across.bandwidth) == (4, 1, 25 * _GIGA / 8)
    assert fabric.inside_node(8).nodes == 1
    over_nodes = fabric.every(16)
    assert (over_nodes.size, over_nodes.across.bandwidth) == (2, 25 * _GIGA / 8)


def test_a_message_to_a_neighbour() -> None:
    fabric = _fabric(2, 2, latency=1e-6)
    assert fabric.send_s(25e9, across=True) == pytest.approx(1.0, rel=1e-3)
    assert fabric.send_s(200e9, across=False) == pytest.approx(1.0, rel=1e-3)


def test_gloo_scatters_by_all_reduce_and_knows_no_trees() -> None:
    """Counted at the interface, torch 2.13: gloo's reduce_scatter of two ranks sends 2.0 times the tensor in all."""
    nccl = _fabric(64, 1, latency=5e-6)
    gloo = replace(nccl, library="gloo")
    assert gloo.collective_s("reduce_scatter", 1e9) == gloo.collective_s("all_reduce", 1e9)
    assert gloo.collective_s("all_gather", 1e9) == nccl.collective_s("all_gather", 1e9)
    assert gloo.collective_s("all_reduce", 8) == pytest.approx(2 * 63 * 15e-6, rel=1e-3)
    assert replace(_fabric(4, 8), library="gloo").every(16).library == "gloo"
