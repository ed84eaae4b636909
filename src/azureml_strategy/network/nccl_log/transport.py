"""Describes the transport that NCCL uses between nodes, according to its log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from azureml_strategy.network.nccl_log.devices import Kind
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
_MOST_NAMES = 2  # adapters that a text names


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
    details = []
    if transport.kind in ("ib", "roce") and transport.hcas:
        details.append(_adapters(transport.hcas))
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


def _adapters(names: tuple[str, ...]) -> str:
    shown = ", ".join(names) if len(names) <= _MOST_NAMES else f"{names[0]} ... {names[-1]}"
    return f"{len(names)} HCA{'s' if len(names) > 1 else ''} ({shown})"
