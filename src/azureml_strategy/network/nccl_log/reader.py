"""Reads the transport that NCCL uses from its log, with `read_transport`."""

from __future__ import annotations

from collections import Counter

from azureml_strategy.network.nccl_log.devices import Kind
from azureml_strategy.network.nccl_log.evidence import Evidence
from azureml_strategy.network.nccl_log.lines import Log, Messages, read_lines
from azureml_strategy.network.nccl_log.transport import Sharp, Transport, Verdict, find, find_errors, judge


def uses_gpudirect(evidence: Evidence, kind: Kind) -> bool | None:
    """Whether adapters access GPU memory directly, by channel lines.

    Without channel lines: False over sockets, or if NCCL disabled it for every GPU (else for every adapter); None
    otherwise.
    """
    over_network = [route.gpudirect for _, route in evidence.routes if route.network]
    if over_network:
        return any(over_network)
    if kind == "socket":
        return False
    decided = evidence.gpudirect.get("GPU") or evidence.gpudirect.get("HCA")
    return False if decided == {False} else None


def count_channels(evidence: Evidence) -> tuple[int, Counter[str]]:
    """Count channel lines over networks, and those inside nodes by route."""
    network, local = 0, Counter[str]()
    for (_, route), lines in evidence.routes.items():
        if route.network:
            network += lines
        else:
            local[route.name] += lines
    return network, local


def name_plugin(evidence: Evidence, verdict: Verdict) -> str | None:
    """The network behind the verdict, else the first one that was selected; None without either."""
    used = [use.network for use in verdict.uses if use.kind == verdict.kind and use.network != "SHARP"]
    selected = [network for _, network in evidence.selected]
    return next(iter(used + selected), None)


def relaxed_ordering(evidence: Evidence, plugin: str | None) -> bool | None:
    """Whether adapters may write out of order; None if unknown. Only NCCL's own network always logs it, since 2.12."""
    if evidence.relaxed_ordering:
        return True
    version = tuple(int(part) for part in (evidence.version or "0").split("."))
    is_off = evidence.relaxed_ordering is False and plugin == "IB" and version >= (2, 12)
    return False if is_off else None


def sharp_state(evidence: Evidence) -> Sharp | None:
    """Whether the switches reduce. An error at start outweighs channel lines, which come before it."""
    if any(error.name == "sharp" for error in evidence.errors):
        return "failed"
    if any(route.collnet for _, route in evidence.routes):
        return "used"
    return "available" if evidence.devices.sharp else None


def read_transport(log: Log) -> Transport:
    """Read from NCCL's log what NCCL uses between nodes.

    NCCL writes such a log with `NCCL_DEBUG=INFO`. The log may contain other output and several ranks and hosts, and it
    may be cut off or damaged. Memory stays bounded for any file or stream.

    Args:
        log: the text itself, a path object, an open file (text or binary), or lines.

    Raises:
        OSError: the file cannot be read.
    """
    evidence = Evidence()
    messages = Messages(evidence)
    for lines in read_lines(log):
        messages.read(lines)
    messages.close()
    verdict = judge(evidence)
    # The adapters with the link layer of the verdict, and those whose link layer no line shows.
    hcas = tuple(evidence.devices.with_link("RoCE" if verdict.kind == "roce" else "IB", None))
    plugin = name_plugin(evidence, verdict)
    network, local = count_channels(evidence)
    return Transport(
        kind=verdict.kind,
        gpudirect=uses_gpudirect(evidence, verdict.kind),
        hcas=hcas,
        interface=next(iter(evidence.interfaces), None),
        errors=find_errors(evidence, verdict),
        findings=tuple(find(evidence, verdict)),
        evidence=verdict.basis,
        plugin=plugin,
        nccl_version=evidence.version,
        library=evidence.library,
        hosts=tuple(sorted(evidence.hosts)),
        ranks=evidence.ranks,
        network_channels=network,
        local_channels=local.total(),
        intra_node=next((name for name, _ in local.most_common(1)), None),
        other_devices=tuple(name for name in evidence.devices.with_link("IB", "RoCE", None) if name not in hcas),
        interfaces=tuple(evidence.interfaces),
        relaxed_ordering=relaxed_ordering(evidence, plugin),
        sharp=sharp_state(evidence),
        pxn=any(route.proxied for _, route in evidence.routes),
    )
