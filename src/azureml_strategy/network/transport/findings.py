"""What is doubtful in a log although no message reports a failure."""

from __future__ import annotations

from collections.abc import Iterator

from azureml_strategy.network.transport.errors import LogError
from azureml_strategy.network.transport.evidence import Evidence
from azureml_strategy.network.transport.networks import family
from azureml_strategy.network.transport.verdict import Verdict

_MOST_NAMES = 8  # in a text
_BRIDGES = ("docker", "virbr", "veth", "br-")  # inside one host


def find(evidence: Evidence, verdict: Verdict) -> Iterator[LogError]:
    """All findings, those that cost most first."""
    yield from _mixed(verdict)
    if verdict.kind == "socket":
        yield from _infiniband_unused(evidence)
        yield from _ip_over_infiniband(evidence)
    if verdict.kind == "roce":
        yield from _roce(evidence)
    yield from _without_gpudirect(evidence, verdict)
    yield from _wrong_interface(evidence)


def find_fallback(evidence: Evidence, verdict: Verdict) -> Iterator[LogError]:
    """That NCCL fell back to sockets for want of an adapter; another network may follow the same message."""
    if verdict.kind == "socket" and evidence.without_device and not any(evidence.devices.with_link("IB")):
        yield LogError(
            "no device",
            evidence.without_device,
            "NCCL saw no InfiniBand adapter and uses TCP. That is right for a VM size without InfiniBand; on others "
            "the container cannot reach the adapters, or a setting hides them.",
            f"On an InfiniBand size unset {_hidden_by(evidence) or 'NCCL_IB_DISABLE and NCCL_IB_HCA'}, and see that "
            "/dev/infiniband and libibverbs are in the container.",
            "warning",
        )


def _mixed(verdict: Verdict) -> Iterator[LogError]:
    by_network: dict[str, set[str]] = {}
    for use in verdict.uses:
        by_network.setdefault(f"{use.network} ({use.kind})", set()).add(use.host or "a host that is not named")
    if len({use.kind for use in verdict.uses}) > 1:
        yield LogError(
            "mixed transports",
            "; ".join(f"{network} on {_names(sorted(hosts))}" for network, hosts in by_network.items()),
            "Ranks use different transports. Every collective waits for the slowest.",
            "Compare the first lines of NCCL on these hosts: adapters, plugin, and variables that begin with NCCL_ "
            "must be the same.",
            "problem",
        )


def _infiniband_unused(evidence: Evidence) -> Iterator[LogError]:
    if hcas := list(evidence.devices.with_link("IB")):
        yield LogError(
            "InfiniBand unused",
            f"InfiniBand adapters {_names(hcas)} are there, but traffic goes over sockets.",
            "TCP carries the traffic between nodes, at a fraction of the bandwidth.",
            f"Unset {_hidden_by(evidence) or 'NCCL_NET and NCCL_IB_DISABLE'}, and see that the plugin loads.",
            "problem",
        )


def _ip_over_infiniband(evidence: Evidence) -> Iterator[LogError]:
    if names := [name for name in evidence.interfaces if name.startswith("ib")]:
        yield LogError(
            "IPoIB",
            f"Sockets over {_names(names)}",
            "Interfaces whose names begin with ib are usually IP over InfiniBand: TCP, slower than verbs on the same "
            "adapter.",
            "Set NCCL_SOCKET_IFNAME=eth0, and let NCCL use the adapters themselves (unset NCCL_IB_DISABLE).",
            "warning",
        )


def _roce(evidence: Evidence) -> Iterator[LogError]:
    roce = list(evidence.devices.with_link("RoCE"))
    hcas = list(evidence.devices.with_link("IB"))
    fix = "Set NCCL_IB_DISABLE=1: TCP over the same adapter is what Azure supports on sizes without InfiniBand."
    if hcas:
        fix = "Set NCCL_IB_HCA=" + "=" + ",".join(f"{name}:1" for name in hcas) + ", which leaves Ethernet out."
    yield LogError(
        "RoCE",
        f"Verbs over Ethernet: {_names(roce)}",
        "NCCL says IB of any verbs device. These are Ethernet devices, on Azure the virtual function of accelerated "
        "networking (mlx5_an0): no InfiniBand.",
        fix,
        "warning",
    )


def _without_gpudirect(evidence: Evidence, verdict: Verdict) -> Iterator[LogError]:
    routes = [route for _, route in evidence.routes if route.network and family(route.network) == "verbs"]
    if evidence.without_module:
        yield LogError(
            "no GPUDirect module",
            evidence.without_module,
            "GPUDirect RDMA is off because the node has not loaded nvidia_peermem and NCCL did not find DMA-BUF: data "
            "takes a detour through the memory of the host.",
            "Use an image with NCCL 2.12 or newer and CUDA 11.7 or newer (DMA-BUF), or a node image of Azure ML that "
            "loads nvidia_peermem.",
            "warning",
        )
    elif verdict.kind == "ib" and routes and not any(route.gpudirect for route in routes):
        yield LogError(
            "GPUDirect unused",
            f"No channel over {routes[0].name} carries GDRDMA.",
            "Data takes a detour through the memory of the host. In a VM NCCL often believes GPU and adapter to be far "
            "apart, because the VM hides the PCIe topology.",
            "Set NCCL_TOPO_FILE to the file of this VM size, or NCCL_NET_GDR_LEVEL=SYS.",
            "warning",
        )


def _wrong_interface(evidence: Evidence) -> Iterator[LogError]:
    wrong = [name for name in evidence.bootstrap if name == "lo" or name.startswith(_BRIDGES)]
    if wrong and (len(evidence.hosts) > 1 or evidence.nodes > 1):
        yield LogError(
            "wrong interface",
            f"Bootstrap over {_names(wrong)}",
            "Ranks tell one another an address that other nodes cannot reach. Excluding the only adapter "
            "(NCCL_SOCKET_IFNAME=^eth) leads here too.",
            "Set NCCL_SOCKET_IFNAME=eth0.",
            "problem",
        )


def _hidden_by(evidence: Evidence) -> str:
    return " and ".join(f"{name}={value}" for name, value in evidence.settings.items())


def _names(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
