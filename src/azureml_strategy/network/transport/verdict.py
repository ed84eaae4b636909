"""From the evidence to the transport between nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from azureml_strategy.network.transport.evidence import Evidence
from azureml_strategy.network.transport.networks import Kind, family, fastest, slowest
from azureml_strategy.network.transport.result import Basis

# Errors after which there is no communicator.
_NOTHING_ESTABLISHED = {"no interface", "bootstrap time-out"}


class Use(NamedTuple):
    """A host's use of a network."""

    host: str | None
    network: str
    kind: Kind


class Verdict(NamedTuple):
    """What carries the traffic between nodes, what that rests on, and which host uses what."""

    kind: Kind
    basis: Basis
    uses: tuple[Use, ...] = ()


def judge(evidence: Evidence) -> Verdict:
    """The transport between nodes.

    What channels use counts first, then what was selected at start, then what was found there: NCCL 2.4 mentions
    sockets, for its bootstrap, even if it uses InfiniBand.
    """
    if uses := _channel_uses(evidence):
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
    return _judge_by_errors(evidence)


def _judge_by_errors(evidence: Evidence) -> Verdict:
    if evidence.routes:
        return Verdict("p2p-only", "channels")
    if evidence.failed:
        use = _use(evidence, None, evidence.failed)
        return Verdict(use.kind, "error", (use,))
    if any(error.name in _NOTHING_ESTABLISHED for error in evidence.errors):
        return Verdict("p2p-only", "error")
    return Verdict("unknown", "none")


def _channel_uses(evidence: Evidence) -> tuple[Use, ...]:
    return _distinct(
        _use(evidence, host, route.network, route.device) for host, route in evidence.routes if route.network
    )


def _is_one_node(evidence: Evidence) -> bool:
    """Whether traffic inside a node, or over NVLink that spans nodes, is all there is to expect."""
    over_nvlink = evidence.nvlink_between_nodes or any("MNNVL" in route.name for _, route in evidence.routes)
    return over_nvlink or (evidence.nodes == 1 and len(evidence.hosts) <= 1)


def _use(evidence: Evidence, host: str | None, network: str, device: int | None = None) -> Use:
    found = family(network)
    kind: Kind = "unknown"
    # A plugin that is not known, but lists verbs devices, uses them.
    if found == "verbs" or (found is None and evidence.devices.links):
        kind = "roce" if evidence.devices.is_ethernet(host, device) else "ib"
    elif found is not None:
        kind = found
    return Use(host, network, kind)


def _distinct(uses: Iterable[Use]) -> tuple[Use, ...]:
    return tuple(dict.fromkeys(uses))
