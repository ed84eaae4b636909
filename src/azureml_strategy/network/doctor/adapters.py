"""InfiniBand and what belongs to it: adapters, GPUDirect RDMA, topology, and the interface for the start."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from azureml_strategy.network.doctor.facts import Facts
from azureml_strategy.network.findings import Finding
from azureml_strategy.network.hardware import find_faults
from azureml_strategy.network.infiniband import HCA

_MOST_NAMES = 2  # written out


def check_adapters(facts: Facts) -> Iterator[Finding]:
    """What carries traffic between nodes."""
    yield from _adapters(facts)
    yield from find_faults(facts.node)
    yield from _gpudirect(facts)
    yield from _topology(facts)
    yield from _interface(facts)


def _adapters(facts: Facts) -> Iterator[Finding]:
    node = facts.node
    # Of these `find_faults` speaks; of a workstation's idle port nobody needs to hear more than that it is idle.
    judged = bool(node.usable_hcas or (node.vm_size and node.vm_size.infiniband))
    if not node.hcas and not judged:
        yield Finding("ok", "InfiniBand", "none")
    infiniband_first = sorted(node.hcas, key=lambda hca: not hca.is_infiniband)
    for _, group in itertools.groupby(infiniband_first, key=_alike):
        hcas = list(group)
        if not (judged and hcas[0].is_infiniband and hcas[0].fault):
            yield Finding("ok", "HCAs" if hcas[0].is_infiniband else "RDMA over Ethernet", _describe(hcas))


def _alike(hca: HCA) -> tuple[object, ...]:
    return hca.link_layer, hca.state, hca.rate_gbps, hca.fault


def _describe(hcas: Sequence[HCA]) -> str:
    first, names = hcas[0], list(dict.fromkeys(hca.name for hca in hcas))
    shown = ", ".join(names) if len(names) <= _MOST_NAMES else f"{names[0]} ... {names[-1]} ({len(names)})"
    each = " each" if len(hcas) > 1 else ""
    nodes = sorted({hca.numa_node for hca in hcas if hca.numa_node is not None})
    parts = [
        first.link_layer or "link layer unknown",
        f"{first.rate_gbps:g} Gb/s{each}" if first.rate_gbps else "rate unknown",
        first.state or "state unknown",
        f"NUMA {', '.join(map(str, nodes))}" if nodes else "NUMA node hidden",
    ]
    text = f"{shown}: {', '.join(parts)}"
    if not first.is_infiniband:
        return f"{text}. Accelerated networking or RoCE, no InfiniBand, whatever NCCL calls it."
    return f"{text}; not usable: {first.fault}" if first.fault else text


def _gpudirect(facts: Facts) -> Iterator[Finding]:
    node = facts.node
    if node.usable_hcas and node.gpus.models and node.gpudirect:
        yield Finding("ok", "GPUDirect RDMA", f"by {node.gpudirect}")


def _topology(facts: Facts) -> Iterator[Finding]:
    node = facts.node
    if node.topology_file:
        yield Finding("ok", "topology file", str(node.topology_file))
    elif node.default_topology:
        yield Finding("ok", "topology file", "NCCL finds one by itself")
    elif node.vm_size and node.vm_size.topology and len(node.gpus.models) > 1:
        yield Finding(
            "warning",
            "topology file",
            f"none for {node.vm_size.name} is here: Azure's images have it on the host, in /opt/microsoft. Without it "
            "NCCL does not know which GPU is near which adapter or other GPU, and small messages take longer.",
            "Write `docker_args: -v /opt/microsoft:/opt/microsoft:ro` in the job's `resources`, or copy the file into "
            "the image (Azure/azhpc-images, topology).",
        )


def _interface(facts: Facts) -> Iterator[Finding]:
    interface = facts.node.bootstrap
    if interface and (facts.num_nodes > 1 or facts.has_accelerators):
        speed = f", {interface.speed_gbps:g} Gb/s" if interface.speed_gbps else ""
        yield Finding("ok", "interface", f"{interface.name}{speed}: nodes meet over it")
    elif facts.num_nodes > 1 and facts.node.interfaces:
        names = ", ".join(each.name for each in facts.node.interfaces)
        yield Finding(
            "warning",
            "interface",
            f"neither eth0 nor one with a default route is up; there are {names}. Nodes may not find one another.",
            "Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface by which other nodes are reached.",
        )
