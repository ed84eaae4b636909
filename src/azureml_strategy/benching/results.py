"""What was measured, and the file that keeps it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from azureml_strategy.benching.verdict import Verdict
from azureml_strategy.network.collectives import Diagnosis, Measurement, PairBandwidths
from azureml_strategy.network.record import RunNetwork


@dataclass(frozen=True)
class Conditions:
    """What the figures were measured with.

    Attributes:
        backend: `nccl` or `gloo`.
        dtype: of the elements.
        nodes: nodes of the job.
        processes_per_node: processes on each.
        device: name of rank 0's device.
        vm_size: as the job or the machine names it.
        iterations: how often each size was timed.
        warmup: how often it ran before that.
        torch: its version.
        nccl: its version; None with gloo.
    """

    backend: str
    dtype: str
    nodes: int
    processes_per_node: int
    device: str
    vm_size: str | None
    iterations: int
    warmup: int
    torch: str
    nccl: str | None


@dataclass(frozen=True)
class Sweep:
    """All collectives over all sizes.

    Attributes:
        measurements: in the order of the table.
        unavailable: the backend's words for each collective that it does not have.
    """

    measurements: Sequence[Measurement]
    unavailable: dict[str, str] = field(default_factory=dict)

    def largest(self, collective: str) -> Measurement | None:
        """A collective at its largest size; None if it was not measured."""
        return next((each for each in reversed(self.measurements) if each.collective == collective), None)

    @property
    def wrong(self) -> list[Measurement]:
        """Measurements of a collective that gave a wrong result."""
        return [each for each in self.measurements if each.wrong]


@dataclass(frozen=True)
class Pairs:
    """Every two nodes.

    Attributes:
        size: message size in bytes.
        bandwidths: of each pair.
        diagnosis: what is slow.
    """

    size: int
    bandwidths: PairBandwidths
    diagnosis: Diagnosis


@dataclass(frozen=True)
class Results:
    """What one run of the benchmark found.

    Attributes:
        conditions: what it was measured with.
        measured: collectives, or pairs of nodes.
        verdict: of all-reduce, or of the best pair; None if neither was measured.
        network: how the nodes talk.
    """

    conditions: Conditions
    measured: Sweep | Pairs
    verdict: Verdict | None
    network: RunNetwork

    @property
    def sound(self) -> bool:
        """Whether every result was right and no node or link slow."""
        if isinstance(self.measured, Sweep):
            return not self.measured.wrong
        return self.measured.diagnosis.healthy and not self.measured.bandwidths.wrong

    def to_json(self) -> str:
        """Everything, for a file."""
        content = {
            "conditions": asdict(self.conditions),
            "verdict": asdict(self.verdict) if self.verdict else None,
            **(_sweep(self.measured) if isinstance(self.measured, Sweep) else _pairs(self.measured)),
            "network": json.loads(self.network.to_json()),
        }
        return json.dumps(content, indent=2)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is complete or not there; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    os.replace(part, path)


def _sweep(sweep: Sweep) -> dict[str, object]:
    return {"collectives": [asdict(each) for each in sweep.measurements], "unavailable": sweep.unavailable}


def _pairs(pairs: Pairs) -> dict[str, object]:
    bandwidths = [
        {"nodes": pair, "bus_bandwidth": bandwidth, "wrong": pair in pairs.bandwidths.wrong}
        for pair, bandwidth in pairs.bandwidths.bus_bandwidth.items()
    ]
    return {"pairs": {"size": pairs.size, "bandwidths": bandwidths, "diagnosis": asdict(pairs.diagnosis)}}
