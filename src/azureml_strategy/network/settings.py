"""Chooses the NCCL settings that fit the hardware of a node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from azureml_strategy.network.conflicts import hca_list
from azureml_strategy.network.node import Node

_IMAGES = "Azure/azhpc-images, components/customizations"
_HEALTH_CHECKS = "Azure/azurehpc-health-checks, environment of the all-reduce test"
_INFRASTRUCTURE = "Azure/ai-infrastructure-on-azure, NCCL configurations"

# From HDR (200 Gb/s) on, a VM's PCIe path limits an adapter that must keep its writes in order.
_RELAXED_FROM_GBPS = 200
_GRACE_BLACKWELL = ("GB200", "GB300")
_HOPPER_AND_LATER = ("H100", "H200", *_GRACE_BLACKWELL)


@dataclass(frozen=True)
class Setting:
    """One environment variable.

    Attributes:
        variable: name of the variable.
        value: value of the variable.
        reason: why it has this value.
        source: origin of the advice, or of a value that was already set.
    """

    variable: str
    value: str
    reason: str
    source: str


def wanted_settings(node: Node, num_nodes: int) -> Iterator[Setting]:
    """The settings that fit a node, regardless of what the user has set.

    Args:
        node: facts about the node.
        num_nodes: number of nodes of the job.
    """
    yield from _sockets(node, num_nodes)
    if node.usable_hcas:
        yield from _adapters(node)
        yield from _gpudirect(node)
        yield from _connections(node, num_nodes)
    else:
        yield from _no_adapters(node)
    yield from _topology(node)
    yield from _grace_blackwell(node)


def _sockets(node: Node, num_nodes: int) -> Iterator[Setting]:
    interface = node.bootstrap
    if interface is None:
        return
    yield Setting(
        "NCCL_SOCKET_IFNAME",
        interface.name,
        "Nodes meet over this interface. NCCL would prefer one called ib*, IP over InfiniBand, which need not be up.",
        _HEALTH_CHECKS,
    )
    if num_nodes > 1:
        yield Setting(
            "GLOO_SOCKET_IFNAME",
            interface.name,
            "gloo takes the address that the host's name resolves to, which may be 127.0.0.1 in a container.",
            "PyTorch, torch.distributed, choosing the network interface",
        )


def _adapters(node: Node) -> Iterator[Setting]:
    usable = node.usable_hcas
    others = [hca.name for hca in node.hcas if not hca.usable]
    left_out = f"; left out: {', '.join(others)}" if others else ""
    yield Setting(
        "NCCL_IB_HCA",
        hca_list(usable),
        f"Exactly the {len(usable)} InfiniBand port(s) that are active and joined{left_out}.",
        "sysfs of this node",
    )
    pkeys = {hca.full_pkey for hca in usable}
    if len(pkeys) == 1 and pkeys != {0}:
        yield Setting(
            "NCCL_IB_PKEY",
            str(pkeys.pop()),
            "The first partition key with full membership is not at index 0.",
            "sysfs of this node",
        )


def _gpudirect(node: Node) -> Iterator[Setting]:
    fastest = max(hca.rate_gbps or 0 for hca in node.usable_hcas)
    if not node.virtual or fastest < _RELAXED_FROM_GBPS:
        return
    yield Setting(
        "NCCL_IB_PCI_RELAXED_ORDERING",
        "1",
        "In a VM, PCIe writes of an adapter to GPU memory are slow unless they may overtake one another.",
        _IMAGES,
    )
    if node.gpudirect and node.topology_file is None and not node.default_topology:
        grace = node.vm_size is not None and node.vm_size.gpu_model in _GRACE_BLACKWELL
        yield Setting(
            "NCCL_NET_GDR_LEVEL",
            "PHB" if grace else "SYS",
            "No topology file is on this node, so every GPU looks far from every adapter, and NCCL would not use "
            "GPUDirect RDMA.",
            _INFRASTRUCTURE if grace else "Azure/aks-rdma-infiniband, pull request 36",
        )


def _connections(node: Node, num_nodes: int) -> Iterator[Setting]:
    if num_nodes > 1 and node.vm_size and node.vm_size.gpu_model in _HOPPER_AND_LATER:
        yield Setting(
            "NCCL_IB_QPS_PER_CONNECTION",
            "4",
            "Several queue pairs take several paths through the fabric, where one may meet a busy link.",
            _INFRASTRUCTURE,
        )


def _no_adapters(node: Node) -> Iterator[Setting]:
    ethernet = [hca.name for hca in node.hcas if hca.is_ethernet]
    if ethernet and node.virtual:  # a machine outside Azure may use RoCE on purpose
        reason = f"Accelerated networking ({', '.join(ethernet)}) is no InfiniBand; NCCL would run RoCE over it."
    elif node.vm_size is not None and not node.vm_size.infiniband:
        reason = f"{node.vm_size.name} has no InfiniBand."
    else:
        return
    yield Setting("NCCL_IB_DISABLE", "1", reason, "NVIDIA/nccl issue 1101; Azure/azurehpc")


def _topology(node: Node) -> Iterator[Setting]:
    # NCCL_GRAPH_FILE stays unset, although the image of NC96ads_A100_v4 sets it: that file is for a group of all four
    # GPUs, and NCCL fails in a smaller one (azurehpc pull request 730; nccl issues 1008 and 1240). It gains nothing.
    if node.topology_file is None or node.vm_size is None:
        return
    path = str(node.topology_file)
    yield Setting(
        "NCCL_TOPO_FILE",
        path,
        "The VM hides its PCIe tree; the file says which GPU and which adapter are near each other.",
        _IMAGES,
    )
    yield Setting(
        "NCCL_IGNORE_CPU_AFFINITY",
        "1",
        "The topology file's NUMA nodes count, not the process's CPU mask.",
        _IMAGES,
    )
    yield Setting(
        "CUDA_DEVICE_ORDER", "PCI_BUS_ID", "The topology file lists GPUs in the order of the bus.", _HEALTH_CHECKS
    )


def _grace_blackwell(node: Node) -> Iterator[Setting]:
    if node.vm_size is None or node.vm_size.gpu_model not in _GRACE_BLACKWELL:
        return
    model = node.vm_size.gpu_model
    if node.usable_hcas:
        reason = f"Azure's configuration of {model} racks has NCCL use this service level of the fabric."
        yield Setting("NCCL_IB_SL", "1", reason, _INFRASTRUCTURE)
    for variable, value, reason in (
        ("NCCL_MNNVL_ENABLE", "1", f"The GPUs of a {model} rack share one NVLink domain across VMs."),
        ("NCCL_NVLS_ENABLE", "1", "The NVLink switches reduce by themselves."),
        ("NCCL_DMABUF_ENABLE", "1", "GPUDirect RDMA works by DMA-BUF here."),
        ("NCCL_NET_GDR_C2C", "1", "Adapters reach GPU memory through the CPU's NVLink-C2C."),
        ("NCCL_SHM_DISABLE", "1", "GPUs of one VM talk over NVLink, not through the host's memory."),
    ):
        yield Setting(variable, value, reason, _INFRASTRUCTURE)
