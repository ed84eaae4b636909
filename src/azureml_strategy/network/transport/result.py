"""What a log says about NCCL's transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from azureml_strategy.network.transport.errors import LogError
from azureml_strategy.network.transport.networks import Kind

Basis = Literal["channels", "collnet", "init", "error", "none"]
Sharp = Literal["used", "failed", "available"]


@dataclass(frozen=True)
class Transport:
    """What NCCL, or RCCL, really uses, of all the ranks and hosts in a log together.

    Attributes:
        kind: what carries the traffic between nodes; where ranks differ, the slowest, which all wait for.
            `p2p-only`: nothing leaves a node, or nothing was established (`evidence` is then `error`).
        gpudirect: adapters read and write GPU memory (GPUDirect RDMA) in at least one channel; False if in none, if it
            is disabled, and over sockets; None if the log cannot show it.
        hcas: names of the InfiniBand adapters; of the RoCE adapters if the kind is `roce`.
        interface: the first interface of the bootstrap or of sockets.
        errors: failures that NCCL or torch reported.
        findings: what is doubtful although nothing failed, such as ranks that use different transports.
        evidence: what the kind rests on: channel lines, those of SHARP (`collnet`), what was selected at start
            (`init`), or an error only.
        plugin: the network plugin, such as `IB` (built in), `IBext_v8`, `Socket` or `AWS Libfabric`.
        nccl_version: such as `2.21.5`; RCCL's if that is the library.
        library: `nccl` or `rccl`.
        hosts: names of the hosts that wrote lines.
        ranks: ranks of the largest communicator.
        network_channels: channel lines over a network; a connection has one at each end.
        local_channels: channel lines inside nodes, or over NVLink between them.
        intra_node: the way inside a node that most channels take, such as `P2P/CUMEM/read`.
        other_devices: adapters that are not in `hcas`.
        interfaces: all interfaces, of the bootstrap and of sockets.
        relaxed_ordering: PCIe relaxed ordering, without which GPUDirect writes are slow in a VM; None if not shown.
        sharp: SHARP is `used`, `failed` at start, or `available` (the adapters offer it); None if not mentioned.
        pxn: another GPU of the node passes data on to the adapter closest to it.
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
