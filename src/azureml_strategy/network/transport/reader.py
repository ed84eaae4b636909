"""`read_transport`: from a log to what NCCL uses."""

from __future__ import annotations

from azureml_strategy.network.transport.evidence import Evidence
from azureml_strategy.network.transport.facts import (
    count_channels,
    list_hcas,
    list_other_devices,
    name_plugin,
    relaxed_ordering,
    sharp_state,
    uses_gpudirect,
)
from azureml_strategy.network.transport.findings import find, find_fallback
from azureml_strategy.network.transport.lines import Messages
from azureml_strategy.network.transport.result import Transport
from azureml_strategy.network.transport.source import Log, read_lines
from azureml_strategy.network.transport.verdict import Verdict, judge


def read_transport(log: Log) -> Transport:
    """Read what NCCL uses between nodes from its log.

    NCCL writes such a log with `NCCL_DEBUG=INFO`. It may be mixed with anything, hold several ranks and hosts, and be
    cut off or damaged. Memory stays bounded for any file or stream.

    Args:
        log: the text itself; or a path object of a file, an open file, text or binary, or lines.

    Raises:
        OSError: the file cannot be read.
    """
    evidence = Evidence()
    messages = Messages(evidence)
    for lines in read_lines(log):
        messages.read(lines)
    messages.close()
    return _conclude(evidence, judge(evidence))


def _conclude(evidence: Evidence, verdict: Verdict) -> Transport:
    hcas = list_hcas(evidence, verdict.kind)
    plugin = name_plugin(evidence, verdict)
    network, local = count_channels(evidence)
    return Transport(
        kind=verdict.kind,
        gpudirect=uses_gpudirect(evidence, verdict.kind),
        hcas=hcas,
        interface=next(iter(evidence.interfaces), None),
        errors=(*evidence.errors, *find_fallback(evidence, verdict)),
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
        other_devices=list_other_devices(evidence, hcas),
        interfaces=tuple(evidence.interfaces),
        relaxed_ordering=relaxed_ordering(evidence, plugin),
        sharp=sharp_state(evidence),
        pxn=any(route.proxied for _, route in evidence.routes),
    )
