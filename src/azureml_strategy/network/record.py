"""Records the network of a run: each node's settings with their reasons, and the transport that resulted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from azureml_strategy.cluster.launch import Launch
from azureml_strategy.network.findings import Finding
from azureml_strategy.network.infiniband import natural_order
from azureml_strategy.network.nccl import NetworkPlan
from azureml_strategy.network.nccl_log import Transport, describe, without_network
from azureml_strategy.network.node import Node

# A job is as fast as its slowest node.
_SLOWEST_FIRST = ("unknown", "socket", "ofi", "roce", "ib", "p2p-only")


@dataclass(frozen=True)
class NodeRecord:
    """One node's part of the record, as it is sent to rank 0. Lists of dictionaries have the fields of dataclasses."""

    node_rank: int
    host: str
    vm_size: str | None
    usable_hcas: list[str]  # InfiniBand ports that NCCL can use, according to sysfs
    settings: list[dict[str, Any]]  # each `Setting` that the plan made
    kept: list[dict[str, Any]]  # each `Setting` that was already there
    findings: list[dict[str, Any]]  # each `Finding`
    kind: str  # of the transport; `unknown` if no log shows it, as with gloo
    gpudirect: bool | None  # whether GPUDirect RDMA is used; None if the log cannot show it
    hcas: list[str]  # adapters in use, according to NCCL's log
    summary: str  # the transport in words
    errors: list[dict[str, Any]]  # each `LogError` from NCCL's log: failures and suspicious conditions

    def to_json(self) -> str:
        """Serialize the record."""
        return json.dumps(asdict(self))

    def complaints(self) -> Iterator[str]:
        """Describe everything on this node that is wrong or slow."""
        for finding in self.findings:
            if finding["verdict"] != "ok":
                yield str(Finding(**finding))
        if self.usable_hcas and self.kind in ("socket", "roce"):
            yield f"{len(self.usable_hcas)} InfiniBand adapters are usable, but NCCL uses {self.summary}."
        for error in self.errors:
            if error["severity"] != "info":
                yield f"{error['text']} {error['explanation']} {error['fix']}"

    @classmethod
    def from_json(cls, text: str | bytes) -> NodeRecord:
        """Parse a record from `to_json`."""
        return cls(**json.loads(text))


def record_node(launch: Launch, host: str, node: Node, plan: NetworkPlan, transport: Transport | str) -> NodeRecord:
    """Build the record of one node. If no log of NCCL can be read, the transport is a description in words."""
    return NodeRecord(
        node_rank=launch.node_rank,
        host=host,
        vm_size=node.vm_size_name,
        usable_hcas=[hca.name for hca in node.usable_hcas],
        settings=[asdict(setting) for setting in plan.settings],
        kept=[asdict(setting) for setting in plan.kept],
        findings=[asdict(finding) for finding in plan.findings],
        **_observed(transport, launch.num_nodes),
    )


def _observed(transport: Transport | str, num_nodes: int) -> dict[str, Any]:
    """The fields of the record that come from NCCL's log."""
    if isinstance(transport, str):
        return {"kind": "unknown", "gpudirect": None, "hcas": [], "summary": transport, "errors": []}
    fields = {
        "kind": transport.kind,
        "gpudirect": transport.gpudirect,
        "hcas": sorted(transport.hcas, key=natural_order),
        "summary": describe(transport),
        "errors": [asdict(error) for error in (*transport.errors, *transport.findings)],
    }
    if num_nodes > 1:
        return fields
    # With one node no traffic leaves it, whatever network NCCL selected.
    errors = [asdict(error) for error in without_network(transport.errors)]
    summary = f"{transport.intra_node or 'one device'}, inside one node"
    return fields | {"kind": "p2p-only", "gpudirect": None, "summary": summary, "errors": errors}


@dataclass(frozen=True)
class RunNetwork:
    """The network of a whole run, on rank 0: the backend, `nccl` or `gloo`, and one record for each node."""

    backend: str
    nodes: Sequence[NodeRecord]

    @property
    def slowest(self) -> NodeRecord:
        """The node whose transport limits the job."""
        return min(self.nodes, key=lambda node: _SLOWEST_FIRST.index(node.kind))

    @property
    def kind(self) -> str:
        """The transport that limits the job: `gloo`, or the kind from `read_transport`."""
        return "gloo" if self.backend == "gloo" else self.slowest.kind

    @property
    def summary(self) -> str:
        """What carries the traffic, in words."""
        slowest = self.slowest
        others = [node for node in self.nodes if node.kind != slowest.kind]
        text = f"{self.backend} over {slowest.summary}"
        return f"{text} (on {slowest.host}; {len(others)} other node(s): {others[0].summary})" if others else text

    @property
    def line(self) -> str:
        """The summary as a line for the console."""
        return f"Network: {self.summary}"

    @property
    def warnings(self) -> list[str]:
        """Everything that is wrong or slow, each with the hosts that it concerns."""
        hosts: dict[str, list[str]] = {}
        for node in self.nodes:
            for text in node.complaints():
                hosts.setdefault(text, []).append(node.host)
        return [f"{', '.join(found)}: {text}" for text, found in hosts.items()]

    @property
    def tags(self) -> dict[str, str]:
        """Tags for a tracked run."""
        slowest = self.slowest
        tags = {
            "network.backend": self.backend,
            "network.transport": self.kind,
            "network.vm_size": slowest.vm_size or "",
        }
        if self.backend == "nccl":
            tags["network.hcas"] = ",".join(slowest.hcas)
            tags["network.gpudirect"] = {True: "yes", False: "no", None: "unknown"}[slowest.gpudirect]
        return {name: value for name, value in tags.items() if value}

    def to_json(self) -> str:
        """The whole record as a JSON document, for an artifact."""
        nodes = [asdict(node) for node in self.nodes]
        return json.dumps({"backend": self.backend, "transport": self.kind, "nodes": nodes}, indent=2)
