"""What joins the GPUs of a cluster: from its VM size, from the user's own benchmark, or from given bandwidths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from azureml_strategy.gpus import gpu_of
from azureml_strategy.network.vm_sizes import VMSize
from azureml_strategy.planning.collectives import Fabric, Tier
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.fitted import Adjustment, Parameters, TierDefaults

NetworkKind = Literal["infiniband", "ethernet"]
_GIGA = 1e9
# Line rate of 16 lanes of PCIe in one direction, in GB/s, by generation, as copies reach it: azurehpc-health-checks
# demands 21 GB/s of generation 4.
_PCIE_GB = {3: 12.0, 4: 24.0, 5: 48.0, 6: 96.0}
# Azure gives no bandwidth for sizes of before 2020. Accelerated networking of that time is documented with up to 25 to
# 32 Gbit/s for the largest sizes, of which one connection over TCP reaches 10.
_OLD_ETHERNET_GBPS = 10.0


@dataclass(frozen=True)
class Joined:
    """A fabric, and what it costs a step beyond its traffic.

    Attributes:
        overhead_s: added to each step of more than one GPU.
        skew: share of a step by which one rank's time differs from another's.
        source: where the bandwidths are from.
        error: relative error to expect of what communication adds; None for that of the network.
    """

    fabric: Fabric
    overhead_s: float = 0.0
    skew: float = 0.0
    source: str = ""
    error: float | None = None


def network_kind(size: VMSize | None, asked: NetworkKind | None) -> NetworkKind:
    """What joins the nodes: what was asked for, else InfiniBand where a VM of the size can use it."""
    if asked is not None:
        return asked
    return "infiniband" if size is not None and size.infiniband else "ethernet"


def fabric_of_size(
    size: VMSize, nodes: int, per_node: int, parameters: Parameters, network: NetworkKind | None = None
) -> Joined:
    """What joins the GPUs of nodes of a VM size.

    Args:
        size: from `network.lookup_vm_size`.
        nodes: number of nodes.
        per_node: GPUs used on each.
        parameters: the fitted numbers.
        network: `infiniband` or `ethernet` between the nodes; None for the best that the size has.

    Raises:
        PlanError: the size has no InfiniBand, or nothing is known of its links.
    """
    kind = network_kind(size, network)
    joined = _without_runs(size, nodes, per_node, parameters, kind)
    adjustment = parameters.adjustments.get((size.short_name, kind))
    return joined if adjustment is None else _adjusted(joined, adjustment)


def _adjusted(joined: Joined, by: Adjustment) -> Joined:
    inside, across = joined.fabric.inside, joined.fabric.across
    fabric = replace(
        joined.fabric,
        inside=_with_slowdown(replace(inside, bandwidth=by.inside * inside.bandwidth), by.slowdown),
        across=_with_slowdown(
            replace(across, bandwidth=by.across * across.bandwidth, latency_s=by.latency * across.latency_s),
            by.slowdown,
        ),
    )
    # Runs inside of one node say nothing of what crosses nodes.
    error = by.error if joined.fabric.nodes > 1 else by.inside_error
    return replace(joined, fabric=fabric, skew=by.skew * joined.skew, source=by.source, error=error)


def _with_slowdown(tier: Tier, factor: float) -> Tier:
    odds = factor * tier.slowdown / (1 - tier.slowdown)
    return replace(tier, slowdown=odds / (1 + odds))


def _without_runs(size: VMSize, nodes: int, per_node: int, parameters: Parameters, kind: NetworkKind) -> Joined:
    link = parameters.links.get((size.short_name, kind))
    if link is not None:
        inside = Tier("inside the node", link.inside, 0.0, link.slowdown)
        across = Tier(kind, link.across, link.latency_s, link.slowdown)
        return Joined(Fabric(nodes, per_node, inside, across), link.overhead_s, 0.0, link.source)
    if kind == "infiniband" and not size.hcas:
        raise PlanError(f"{size.name} has no InfiniBand. Leave the network out, or write ethernet.")
    inside, across = _inside(size, parameters), _across(size, kind, parameters)
    return Joined(Fabric(nodes, per_node, inside, across), 0.0, parameters.skew, size.source)


def fabric_of_bandwidths(
    nodes: int,
    per_node: int,
    inside_gb: float,
    across_gb: float,
    parameters: Parameters,
    network: NetworkKind = "infiniband",
) -> Joined:
    """What joins GPUs whose bus bandwidths are given in GB/s, as nccl-tests reports them for large messages.

    Raises:
        PlanError: a bandwidth is not positive.
    """
    for name, value in (("inside_gb", inside_gb), ("across_gb", across_gb)):
        if not value > 0:
            raise PlanError(
                f"{name} is {value:g}. Give the bus bandwidth in GB/s, as `azureml-strategy bench` prints it."
            )
    near, far = _defaults(parameters, "NVLink"), _defaults(parameters, _TIER_OF[network])
    inside = Tier("given", inside_gb * _GIGA, near.latency_s, near.slowdown)
    across = Tier(network, across_gb * _GIGA, far.latency_s, far.slowdown)
    return Joined(Fabric(nodes, per_node, inside, across), 0.0, parameters.skew, "given")


_TIER_OF: Mapping[NetworkKind, str] = {"infiniband": "InfiniBand", "ethernet": "Ethernet"}


def _defaults(parameters: Parameters, name: str) -> TierDefaults:
    return next(found for start, found in parameters.tiers.items() if name.startswith(start))


def _inside(size: VMSize, parameters: Parameters) -> Tier:
    name = size.interconnect or "PCIe"
    defaults = _defaults(parameters, name)
    if size.bus_bandwidth is not None:
        return Tier(name, size.bus_bandwidth * _GIGA, defaults.latency_s, defaults.slowdown)
    gpu = gpu_of(size)
    pcie = _PCIE_GB[gpu.pcie if gpu else 4]
    line = gpu.nvlink_bandwidth if gpu and gpu.nvlink_bandwidth and name != "PCIe" else pcie
    return Tier(name, defaults.efficiency * line * _GIGA, defaults.latency_s, defaults.slowdown)


def _across(size: VMSize, kind: NetworkKind, parameters: Parameters) -> Tier:
    name = _TIER_OF[kind]
    defaults = _defaults(parameters, name)
    if kind == "ethernet":
        line = (size.ethernet_gbps or _OLD_ETHERNET_GBPS) / 8
        return Tier(name, defaults.efficiency * line * _GIGA, defaults.latency_s, defaults.slowdown)
    if size.bus_bandwidth_two_nodes is not None:
        return Tier(name, size.bus_bandwidth_two_nodes * _GIGA, defaults.latency_s, defaults.slowdown)
    line = (size.hcas or 1) * (size.hca_gbps or 0) / 8
    reached = (size.hcas or 1) * size.hca_expected_gbps / 8 if size.hca_expected_gbps else defaults.efficiency * line
    return Tier(name, reached * _GIGA, defaults.latency_s, defaults.slowdown)
