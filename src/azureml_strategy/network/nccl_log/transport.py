"""The transport between nodes: its description, and how it and its suspicious sides follow from a log's evidence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from azureml_strategy.network.nccl_log.devices import Kind, family, fastest, slowest
from azureml_strategy.network.nccl_log.evidence import Evidence
from azureml_strategy.network.nccl_log.failures import LogError

Basis = Literal["channels", "collnet", "init", "error", "none"]
Sharp = Literal["used", "failed", "available"]

_NAMES: dict[Kind, str] = {
    "ib": "InfiniBand",
    "roce": "RoCE (verbs over Ethernet)",
    "socket": "TCP sockets",
    "ofi": "libfabric",
    "p2p-only": "inside nodes only",
    "unknown": "unknown transport",
}
_MOST_ADAPTERS = 2  # adapters that a text names


@dataclass(frozen=True)
class Transport:
    """What NCCL or RCCL really uses, for all ranks and hosts in a log together.

    Attributes:
        kind: what carries the traffic between nodes. If ranks differ, the slowest kind, which all ranks wait for.
            `p2p-only`: no traffic leaves a node, or no connection was established (`evidence` is then `error`).
        gpudirect: whether adapters read and write GPU memory (GPUDirect RDMA) in at least one channel; False if
            disabled or over sockets; None if the log cannot show it.
        hcas: names of the InfiniBand adapters, or of the RoCE adapters if the kind is `roce`.
        interface: the first interface of the bootstrap or of sockets.
        errors: failures that NCCL or torch reported.
        findings: suspicious conditions without a failure message, such as ranks that use different transports.
        evidence: what the kind is based on: `channels` (channel lines), `collnet` (those of SHARP), `init` (networks
            selected or found at start), `error` (only an error) or `none`.
        plugin: network plugin, such as `IB` (built in), `IBext_v8`, `Socket` or `AWS Libfabric`.
        nccl_version: version of NCCL, or of RCCL if that is the library, such as `2.21.5`.
        library: `nccl` or `rccl`.
        hosts: names of the hosts that wrote lines.
        ranks: number of ranks of the largest communicator.
        network_channels: number of channel lines over a network; a connection has one at each end.
        local_channels: number of channel lines inside nodes, or over NVLink between them.
        intra_node: the route inside a node that most channels take, such as `P2P/CUMEM/read`.
        other_devices: adapters that are not in `hcas`.
        interfaces: all interfaces of the bootstrap and of sockets.
        relaxed_ordering: whether PCIe relaxed ordering is on; without it GPUDirect writes are slow in a VM. None if
            the log does not show it.
        sharp: `used`, `failed` at start, or `available` (the adapters offer SHARP); None if not mentioned.
        pxn: whether another GPU of the node forwards data to the adapter closest to it.
    """

    kind: Kind
    gpudirect: bool | None
    hcas: tuple[str, ...]
    interface: str | None
    errors: tuple[LogError, ...]
    findings: tuple[LogError, ...]
    evidence: Basis
    plugin: str | None
    nccl_version: str | None
    library: Literal["nccl", "rccl"]
    hosts: tuple[str, ...]
    ranks: int | None
    network_channels: int
    local_channels: int
    intra_node: str | None
    other_devices: tuple[str, ...]
    interfaces: tuple[str, ...]
    relaxed_ordering: bool | None
    sharp: Sharp | None
    pxn: bool


def describe(transport: Transport) -> str:
    """The transport in words, such as `InfiniBand, 8 HCAs (mlx5_ib0 ... mlx5_ib7), GPUDirect RDMA`."""
    if transport.kind == "unknown":
        return "unknown transport: the log has no line that shows it; run with NCCL_DEBUG=INFO"
    if transport.evidence == "error" and transport.kind == "p2p-only":
        return "nothing established: NCCL failed at start"
    return ", ".join([_NAMES[transport.kind], *_details(transport)])


def _details(transport: Transport) -> list[str]:
    details, names = [], transport.hcas
    if transport.kind in ("ib", "roce") and names:
        shown = ", ".join(names) if len(names) <= _MOST_ADAPTERS else f"{names[0]} ... {names[-1]}"
        details.append(f"{len(names)} HCA{'s' if len(names) > 1 else ''} ({shown})")
    if transport.kind in ("ib", "roce", "ofi") and transport.gpudirect is not None:
        details.append("GPUDirect RDMA" if transport.gpudirect else "no GPUDirect RDMA")
    if transport.kind == "socket" and transport.interface:
        details.append(transport.interface)
    if transport.kind == "p2p-only" and transport.intra_node:
        details.append(transport.intra_node)
    if transport.sharp == "used":
        details.append("SHARP")
    if transport.evidence in ("init", "error"):
        details.append("no channel seen yet")
    return details


# These errors are about the way between nodes.
_ABOUT_NETWORKS = {"no device", "libibverbs"}
# After these errors there is no communicator.
_NOTHING_ESTABLISHED = {"no interface", "bootstrap time-out"}
_MOST_NAMES = 8  # names that a text lists
_VIRTUAL_FUNCTION = "enP"
_BRIDGES = ("docker", "virbr", "veth", "br-")  # interfaces that do not leave the host


class Use(NamedTuple):
    """A host's use of a network."""

    host: str | None
    network: str
    kind: Kind


class Verdict(NamedTuple):
    """What carries the traffic between nodes, the basis of that, and which host uses which network."""

    kind: Kind
    basis: Basis
    uses: tuple[Use, ...] = ()


def judge(evidence: Evidence) -> Verdict:
    """Decide which transport NCCL uses between nodes.

    Channel lines decide first, then the networks selected at start, then the fastest network found at start: NCCL 2.4
    mentions sockets, for its bootstrap, even if it uses InfiniBand. Errors decide last.
    """
    uses = _distinct(
        _use(evidence, host, route.network, route.device) for host, route in evidence.routes if route.network
    )
    if uses:
        is_net = any(route.network and not route.collnet for _, route in evidence.routes)
        return Verdict(slowest(use.kind for use in uses), "channels" if is_net else "collnet", uses)
    if evidence.routes and _is_one_node(evidence):
        return Verdict("p2p-only", "channels")
    if evidence.selected:
        uses = _distinct(_use(evidence, host, network) for host, network in evidence.selected)
        return Verdict(slowest(use.kind for use in uses), "init", uses)
    if evidence.loaded:
        uses = _distinct(_use(evidence, None, network) for network in evidence.loaded)
        best = fastest(use.kind for use in uses)
        return Verdict(best, "init", tuple(use for use in uses if use.kind == best))
    if evidence.routes:
        return Verdict("p2p-only", "channels")
    if evidence.failed:
        use = _use(evidence, None, evidence.failed)
        return Verdict(use.kind, "error", (use,))
    if any(error.name in _NOTHING_ESTABLISHED for error in evidence.errors):
        return Verdict("p2p-only", "error")
    return Verdict("unknown", "none")


def _is_one_node(evidence: Evidence) -> bool:
    """Whether all traffic stays inside one node, or on NVLink that spans nodes."""
    over_nvlink = evidence.nvlink_between_nodes or any("MNNVL" in route.name for _, route in evidence.routes)
    return over_nvlink or (evidence.nodes <= 1 and len(evidence.hosts) <= 1)


def _use(evidence: Evidence, host: str | None, network: str, device: int | None = None) -> Use:
    found = family(network)
    # An unknown plugin uses the verbs devices if the log lists any.
    if found == "verbs" or (found is None and evidence.devices.links):
        return Use(host, network, "roce" if evidence.devices.is_ethernet(host, device) else "ib")
    return Use(host, network, found or "unknown")


def _distinct(uses: Iterable[Use]) -> tuple[Use, ...]:
    return tuple(dict.fromkeys(uses))


def find(evidence: Evidence, verdict: Verdict) -> Iterator[LogError]:
    """All findings, the most costly first."""
    yield from _mixed(verdict)
    if verdict.kind == "socket":
        yield from _infiniband_unused(evidence)
        yield from _ip_over_infiniband(evidence)
        yield from _virtual_function(evidence)
    if verdict.kind == "roce":
        yield from _roce(evidence)
    yield from _without_gpudirect(evidence, verdict)
    yield from _wrong_interface(evidence)


def without_network(errors: Iterable[LogError]) -> tuple[LogError, ...]:
    """The errors that matter inside one node. No traffic leaves it, so nothing is lost where NCCL found no network."""
    return tuple(error for error in errors if error.name not in _ABOUT_NETWORKS)


def find_errors(evidence: Evidence, verdict: Verdict) -> tuple[LogError, ...]:
    """The failures that the log reports, and a fallback to sockets."""
    errors = (*evidence.errors, *_fallback(evidence, verdict))
    is_one_node = evidence.nodes == 1 and len(evidence.hosts) <= 1
    return without_network(errors) if is_one_node else errors


def _fallback(evidence: Evidence, verdict: Verdict) -> Iterator[LogError]:
    """The error that NCCL fell back to sockets because it saw no adapter.

    Its message alone does not prove a fallback: NCCL may then use another network.
    """
    if verdict.kind == "socket" and evidence.without_device and not evidence.devices.with_link("IB"):
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
            "; ".join(f"{network} on {some_of(sorted(hosts))}" for network, hosts in by_network.items()),
            "Ranks use different transports. Every collective waits for the slowest.",
            "Compare the first lines of NCCL on these hosts: adapters, plugin, and variables that begin with NCCL_ "
            "must be the same.",
            "problem",
        )


def _infiniband_unused(evidence: Evidence) -> Iterator[LogError]:
    if hcas := evidence.devices.with_link("IB"):
        yield LogError(
            "InfiniBand unused",
            f"InfiniBand adapters {some_of(hcas)} are there, but traffic goes over sockets.",
            "TCP carries the traffic between nodes, at a fraction of the bandwidth.",
            f"Unset {_hidden_by(evidence) or 'NCCL_NET and NCCL_IB_DISABLE'}, and see that the plugin loads.",
            "problem",
        )


def _ip_over_infiniband(evidence: Evidence) -> Iterator[LogError]:
    if names := [name for name in evidence.interfaces if name.startswith("ib")]:
        yield LogError(
            "IPoIB",
            f"Sockets over {some_of(names)}",
            "Interfaces whose names begin with ib are usually IP over InfiniBand: TCP, slower than verbs on the same "
            "adapter.",
            "Set NCCL_SOCKET_IFNAME=eth0, and let NCCL use the adapters themselves (unset NCCL_IB_DISABLE).",
            "warning",
        )


def _virtual_function(evidence: Evidence) -> Iterator[LogError]:
    names = [name for name in evidence.interfaces if name.startswith(_VIRTUAL_FUNCTION)]
    others = [name for name in evidence.interfaces if not name.startswith(_VIRTUAL_FUNCTION)]
    if names and others:
        yield LogError(
            "virtual function",
            f"Sockets over {some_of(names)} beside {some_of(others)}",
            "On Azure enP... is the virtual function of accelerated networking. It carries the traffic of eth0, and "
            "has no address that other nodes reach: connections over it fail, or wait until they are tried elsewhere.",
            "Set NCCL_SOCKET_IFNAME=eth0 on all nodes.",
            "warning",
        )


def _roce(evidence: Evidence) -> Iterator[LogError]:
    roce = evidence.devices.with_link("RoCE")
    hcas = evidence.devices.with_link("IB")
    fix = "Set NCCL_IB_DISABLE=1: TCP over the same adapter is what Azure supports on sizes without InfiniBand."
    if hcas:
        fix = "Set NCCL_IB_HCA=" + "=" + ",".join(f"{name}:1" for name in hcas) + ", which leaves Ethernet out."
    yield LogError(
        "RoCE",
        f"Verbs over Ethernet: {some_of(roce)}",
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
            "Use an image with NCCL 2.13 or newer and CUDA 11.7 or newer (DMA-BUF), or a node image of Azure ML that "
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
            f"Bootstrap over {some_of(wrong)}",
            "Ranks tell one another an address that other nodes cannot reach. Excluding the only adapter "
            "(NCCL_SOCKET_IFNAME=^eth) leads here too.",
            "Set NCCL_SOCKET_IFNAME=eth0.",
            "problem",
        )


def _hidden_by(evidence: Evidence) -> str:
    return " and ".join(f"{name}={value}" for name, value in evidence.settings.items())


def some_of(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
