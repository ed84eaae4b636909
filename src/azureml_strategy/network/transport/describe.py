"""One line for a console."""

from __future__ import annotations

from azureml_strategy.network.transport.networks import Kind
from azureml_strategy.network.transport.result import Transport

_NAMES: dict[Kind, str] = {
    "ib": "InfiniBand",
    "roce": "RoCE (verbs over Ethernet)",
    "socket": "TCP sockets",
    "ofi": "libfabric",
    "p2p-only": "inside nodes only",
    "unknown": "unknown transport",
}
_MOST_NAMES = 2  # of adapters written out


def describe(transport: Transport) -> str:
    """Such as `InfiniBand, 8 HCAs (mlx5_ib0 ... mlx5_ib7), GPUDirect RDMA`."""
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
