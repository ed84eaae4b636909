"""Checks the machine: its InfiniBand adapters, its GPUs, and its VM size."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from azureml_strategy.network.doctor.facts import Facts, has_accelerators
from azureml_strategy.network.findings import Finding, find_faults
from azureml_strategy.network.infiniband import HCA
from azureml_strategy.network.sysfs import read_text
from azureml_strategy.network.vm_sizes import UnknownVMSize, VMSize, known_vm_sizes, lookup_vm_size, nearest_vm_size

_MOST_NAMES = 2  # adapters that a text names

# `NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 ...`; the open one says `Kernel Module for x86_64`.
_DRIVER = re.compile(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)")
# The oldest driver for each CUDA (NVIDIA, "CUDA Compatibility", minor version compatibility). An older driver needs the
# forward-compatibility libraries; CUDA images have them in this folder.
_OLDEST_DRIVERS = {"13": 580, "12": 525}
_COMPATIBILITY_LIBRARIES = "usr/local/cuda/compat"
_SUBJECT = "VM size"


def check_adapters(facts: Facts) -> Iterator[Finding]:
    """Check what carries traffic between nodes: adapters, GPUDirect RDMA, topology file and interface."""
    yield from _adapters(facts)
    yield from find_faults(facts.node)
    node = facts.node
    if node.usable_hcas and node.gpus.models and node.gpudirect:
        yield Finding("ok", "GPUDirect RDMA", f"by {node.gpudirect}")
    yield from _topology(facts)
    yield from _interface(facts)


def _adapters(facts: Facts) -> Iterator[Finding]:
    node = facts.node
    # `find_faults` then reports the faulty ports. On other machines, such as a workstation, an idle port is no fault.
    judged = bool(node.usable_hcas or (node.vm_size and node.vm_size.infiniband))
    if not node.hcas and not judged:
        yield Finding("ok", "InfiniBand", "none")
    infiniband_first = sorted(node.hcas, key=lambda hca: not hca.is_infiniband)
    alike = itertools.groupby(infiniband_first, key=lambda hca: (hca.link_layer, hca.state, hca.rate_gbps, hca.fault))
    for _, group in alike:
        hcas = list(group)
        if not (judged and hcas[0].is_infiniband and hcas[0].fault):
            yield Finding("ok", "HCAs" if hcas[0].is_infiniband else "RDMA over Ethernet", _describe_adapters(hcas))


def _describe_adapters(hcas: Sequence[HCA]) -> str:
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
    if interface and (facts.num_nodes > 1 or has_accelerators(facts.node)):
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


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """Check the number of GPUs against job, VM size and launch, the driver against CUDA, torch's build against GPUs."""
    size, present = facts.node.vm_size, len(facts.node.gpus.models)
    promised = (facts.job and facts.job.gpus_per_node) or (size and size.gpus) or 0
    if present < promised:
        yield Finding(
            "problem",
            "GPUs",
            f"{promised} are promised, {f'only {_names(facts)}' if present else 'none'} can be seen here.",
            "Replace the node if a GPU has failed (restart the job with a fresh one). If the container was started by "
            "you, give it all GPUs: `docker run --gpus all`.",
        )
    elif present:
        yield Finding("ok", "GPUs", _names(facts))
    else:
        yield Finding("ok", "GPUs", "none: training runs on the CPU.")
    if present:
        yield from _driver(facts)
        yield from _build(facts)
        yield from _processes(facts, present)


def _names(facts: Facts) -> str:
    names = Counter(name or "GPU (the driver hides its model)" for name in facts.node.gpus.models)
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def _driver(facts: Facts) -> Iterator[Finding]:
    found = _DRIVER.search(read_text(facts.root / "proc/driver/nvidia/version") or "")
    if not found:
        return
    version, cuda = found[1], facts.versions["cuda"]
    oldest = _OLDEST_DRIVERS.get((cuda or "").partition(".")[0], 0)
    if int(version.partition(".")[0]) >= oldest or os.path.isdir(facts.root / _COMPATIBILITY_LIBRARIES):
        yield Finding("ok", "driver", f"NVIDIA {version}")
        return
    yield Finding(
        "problem",
        "driver",
        f"NVIDIA {version} is older than {oldest}, which CUDA {cuda} of the installed torch needs: torch sees no GPU.",
        "Install a torch built for an older CUDA, or use an image with the package cuda-compat.",
    )


def _build(facts: Facts) -> Iterator[Finding]:
    torch, amd = facts.versions["torch"] or "", facts.node.gpus.vendor == "amd"
    # Builds in a vendor's own image have other labels, or none, and fit.
    if any(label in torch for label in ("+cpu", "+cu" if amd else "+rocm")):
        yield Finding(
            "problem",
            "torch",
            f"{torch} is no build for {'AMD' if amd else 'NVIDIA'} GPUs: they stay unused.",
            "Install the one that https://pytorch.org/get-started/locally names for this machine.",
        )


def _processes(facts: Facts, present: int) -> Iterator[Finding]:
    launch = facts.launch
    if launch is None or launch.local_world_size in (1, present):
        return
    number = f"{launch.local_world_size} processes on each node, but {present} GPU(s)"
    advice = f"Write `process_count_per_instance: {present}`."
    if launch.local_world_size > present:
        yield Finding("problem", "GPUs", f"{number}: NCCL refuses two ranks on one GPU.", advice)
    else:
        yield Finding("warning", "GPUs", f"{number}: {present - launch.local_world_size} stay idle.", advice)


def check_size(facts: Facts) -> Iterator[Finding]:
    """Check the VM size and whether it suits the job; outside Azure, report nothing."""
    name = facts.node.vm_size_name
    if name is None:
        if facts.job or facts.node.azure:
            yield Finding("ok", _SUBJECT, "named neither by the job nor by the machine; nothing is compared with it.")
        return
    try:
        size = lookup_vm_size(name)
    except UnknownVMSize as error:
        yield Finding("warning", _SUBJECT, str(error), "Nothing is compared with what the size promises.")
        return
    yield _describe_size(size, facts.node.vm_size_source)
    if size.retired:
        yield Finding(
            "warning",
            _SUBJECT,
            f"Azure retired {size.name} on {size.retired}: no new nodes can be had.",
            "Make a cluster of a current size.",
        )
    if facts.num_nodes > 1 and size.gpus != 0 and not size.infiniband:
        yield _without_infiniband(size, facts.num_nodes)


def _describe_size(size: VMSize, source: str | None) -> Finding:
    if size.known:
        return Finding("ok", _SUBJECT, f"{size.name} (from {source}): {', '.join(_promises(size))}")
    if size.gpus == 0:
        return Finding("ok", _SUBJECT, f"{size.name} (from {source}): no GPU, by its name")
    nearest = nearest_vm_size(size.name)
    hint = f"; the nearest name in it is {nearest}" if nearest else ""
    return Finding(
        "warning",
        _SUBJECT,
        f"{size.name} is not in this package's table{hint}. By its letters it has "
        f"{'InfiniBand' if size.infiniband else 'no InfiniBand that a VM can use'}; nothing else is compared.",
        "If it is a new size, report it with its GPUs and adapters.",
    )


def _promises(size: VMSize) -> Iterator[str]:
    memory = f" {size.gpu_memory_gb:g} GB" if size.gpu_memory_gb else ""
    yield f"{size.gpus} x {size.gpu_model}{memory} ({size.interconnect})"
    if size.infiniband:
        yield f"{size.hcas} HCA(s) of {size.hca_gbps} Gb/s"
    else:
        yield "InfiniBand without SR-IOV, which a VM cannot use" if size.hcas else "no InfiniBand"
    if size.ethernet_gbps:
        yield f"Ethernet {size.ethernet_gbps:g} Gb/s"
    if size.bus_bandwidth:
        yield f"all-reduce bus bandwidth of one node at least {size.bus_bandwidth:g} GB/s"


def _without_infiniband(size: VMSize, num_nodes: int) -> Finding:
    cost = ""
    if size.ethernet_gbps:
        gbytes = size.ethernet_gbps / 8
        # A ring all-reduce sends and receives 2 (n - 1) / n of the data on each node (NCCL tests, PERFORMANCE.md).
        seconds = 2 * (num_nodes - 1) / num_nodes / gbytes
        cost = f" at {gbytes:g} GB/s at most: an all-reduce of 1 GB of gradients takes at least {seconds:.2g} s"
    return Finding(
        "warning",
        _SUBJECT,
        f"{num_nodes} nodes of {size.name} share gradients over Ethernet{cost}.",
        f"Use a size with InfiniBand, such as {_with_infiniband(size)}; or one node with more GPUs; or "
        "AzureMLDDPStrategy(gradient_compression='bf16'), which halves what is sent.",
    )


def _with_infiniband(size: VMSize) -> str:
    """A current size with the same GPU model and InfiniBand, else the size with the most common GPU that has it."""
    current = (each for each in known_vm_sizes() if each.infiniband and not each.retired)
    fitting = [each.name for each in current if each.gpu_model == size.gpu_model]
    return fitting[-1] if fitting else lookup_vm_size("ND96isr_H100_v5").name
