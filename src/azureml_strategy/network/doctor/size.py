"""The VM size: what it promises, and what it cannot do."""

from __future__ import annotations

from collections.abc import Iterator

from azureml_strategy.network.doctor.facts import Facts
from azureml_strategy.network.findings import Finding
from azureml_strategy.network.vm_sizes import UnknownVMSize, VMSize, known_vm_sizes, lookup_vm_size, nearest_vm_size

_SUBJECT = "VM size"


def check_size(facts: Facts) -> Iterator[Finding]:
    """The VM size and whether it suits the job; nothing outside Azure."""
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
    yield _describe(size, facts.node.vm_size_source)
    if size.retired:
        yield _retired(size)
    if facts.num_nodes > 1 and size.gpus != 0 and not size.infiniband:
        yield _without_infiniband(size, facts.num_nodes)


def _describe(size: VMSize, source: str | None) -> Finding:
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


def _retired(size: VMSize) -> Finding:
    return Finding(
        "warning",
        _SUBJECT,
        f"Azure retired {size.name} on {size.retired}: no new nodes can be had.",
        "Make a cluster of a current size.",
    )


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
    """A size with the same GPUs and InfiniBand, else the one with the most common GPU that has it."""
    fitting = [
        each.name
        for each in known_vm_sizes()
        if each.infiniband and not each.retired and each.gpu_model == size.gpu_model
    ]
    return fitting[-1] if fitting else lookup_vm_size("ND96isr_H100_v5").name
