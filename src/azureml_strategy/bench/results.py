"""Holds the results of a benchmark, judges whether they are what the hardware should give, writes them as JSON, and
logs them as metrics of the MLflow run.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from azureml_strategy.bench.measure import Diagnosis, Measurement, PairBandwidths
from azureml_strategy.bench.options import BenchError
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.network.record import NodeRecord, RunNetwork
from azureml_strategy.network.vm_sizes import VMSize
from azureml_strategy.tracking.batch import Metrics, Record, Tags, make_batches
from azureml_strategy.tracking.run import join_run, resolve_tracking_uri

AS_EXPECTED = "as expected"
BELOW = "below expected"
HALF = "half of expected: one bad node or HCA in the ring"
UNKNOWN_SIZE = "unknown size"
NOTHING_KNOWN = "nothing to compare with"
# A ring is as fast as its slowest link: published runs with one bad node or HCA reached half of the others' bandwidth.
_HALF = (0.4, 0.6)
_ENOUGH = 0.9
_FOLDER = "bench"


@dataclass(frozen=True)
class Expectation:
    """What all-reduce should reach with large messages.

    Attributes:
        bandwidth: bus bandwidth in GB/s; None if it is not known.
        reason: source of the bandwidth, or why it is not known.
        is_line_rate: whether it is the upper bound of the links, not a measured value.
        known_size: whether the VM size is in the table.
    """

    bandwidth: float | None
    reason: str
    is_line_rate: bool = False
    known_size: bool = True


@dataclass(frozen=True)
class Verdict:
    """A measured bus bandwidth in GB/s, compared with its expectation."""

    word: str
    measured: float
    expectation: Expectation

    @property
    def text(self) -> str:
        """One line for the console."""
        expected = self.expectation
        measured = f"all-reduce reached {self.measured:.4g} GB/s: {self.word}"
        if expected.bandwidth is None:
            return f"{measured} ({expected.reason})"
        share = f"{self.measured / expected.bandwidth:.0%} of {expected.bandwidth:.4g} GB/s"
        return f"{measured} ({share}, {expected.reason})"


def expect(
    size: VMSize | None, *, backend: str, nodes: int, processes_per_node: int, given: float | None = None
) -> Expectation:
    """Return what a job's all-reduce should reach on these VMs; `given` is what the user expects, in GB/s."""
    if given is not None:
        return Expectation(given, "as --expect says")
    if size is None or not size.known:
        name = f"{size.name} is not in the table" if size else "the job does not name its VM size"
        return Expectation(None, f"{name}; give --expect GB/s", known_size=False)
    if backend == "gloo":
        return _over_sockets(size, nodes)
    if processes_per_node != size.gpus:
        return Expectation(None, f"{size.name} has {size.gpus} GPUs, and {processes_per_node} of them took part")
    return _over_nccl(size, nodes)


def judge(measured: float, expectation: Expectation, *, in_ring: bool) -> Verdict:
    """Compare a bus bandwidth, in GB/s, with its expectation.

    `in_ring` says that several nodes took part, so that one could slow down the others.
    """
    if expectation.bandwidth is None:
        return Verdict(NOTHING_KNOWN if expectation.known_size else UNKNOWN_SIZE, measured, expectation)
    share = measured / expectation.bandwidth
    if share >= _ENOUGH:
        return Verdict(AS_EXPECTED, measured, expectation)
    is_half = _HALF[0] <= share <= _HALF[1] and in_ring and not expectation.is_line_rate
    return Verdict(HALF if is_half else BELOW, measured, expectation)


def _over_nccl(size: VMSize, nodes: int) -> Expectation:
    if nodes == 1:
        return _published(size.bus_bandwidth, f"{size.name}, one node")
    if size.bus_bandwidth_two_nodes is not None:
        return _published(size.bus_bandwidth_two_nodes, f"{size.name}, two nodes")
    if size.infiniband and size.hcas and size.hca_gbps:
        return _line_rate(size.hcas * size.hca_gbps, f"{size.hcas} HCAs of {size.hca_gbps} Gb/s in {size.name}")
    return _over_sockets(size, nodes)


def _over_sockets(size: VMSize, nodes: int) -> Expectation:
    if nodes == 1:
        return Expectation(None, "gloo inside one node meets no network")
    if size.ethernet_gbps is None:
        return Expectation(None, f"the Ethernet of {size.name} is not published")
    return _line_rate(size.ethernet_gbps, f"the Ethernet of {size.name}")


def _line_rate(gbps: float, of: str) -> Expectation:
    return Expectation(gbps / 8, f"the line rate of {of}, an upper bound", is_line_rate=True)


def _published(bandwidth: float | None, of: str) -> Expectation:
    if bandwidth is None:
        return Expectation(None, f"no figure is published for {of}")
    return Expectation(bandwidth, f"what is published for {of}")


@dataclass(frozen=True)
class Conditions:
    """What the figures were measured with.

    Attributes:
        device: name of rank 0's device.
        vm_size: VM size as the job or the machine names it.
        iterations: number of timed runs of each size, after the `warmup`.
        nccl: version of NCCL; None with gloo.
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
    """The measurements of all collectives at all sizes, and why the backend cannot do a collective, in its words."""

    measurements: Sequence[Measurement]
    unavailable: dict[str, str] = field(default_factory=dict)

    def largest(self, collective: str) -> Measurement | None:
        """Return the measurement of a collective at its largest size; None if it was not measured."""
        return next((each for each in reversed(self.measurements) if each.collective == collective), None)

    def to_dict(self) -> dict[str, object]:
        """Return the measurements as values of JSON, by key of the file."""
        return {"collectives": [asdict(each) for each in self.measurements], "unavailable": self.unavailable}

    @property
    def wrong(self) -> list[Measurement]:
        """Measurements whose collective gave a wrong result."""
        return [each for each in self.measurements if each.wrong]


@dataclass(frozen=True)
class Pairs:
    """The measurements of every two nodes, with messages of `size` bytes."""

    size: int
    bandwidths: PairBandwidths
    diagnosis: Diagnosis

    def to_dict(self) -> dict[str, object]:
        """Return the measurements as values of JSON, by key of the file."""
        bandwidths = [
            {"nodes": pair, "bus_bandwidth": bandwidth, "wrong": pair in self.bandwidths.wrong}
            for pair, bandwidth in self.bandwidths.bus_bandwidth.items()
        ]
        return {"pairs": {"size": self.size, "bandwidths": bandwidths, "diagnosis": asdict(self.diagnosis)}}


@dataclass(frozen=True)
class Results:
    """The results of one run of the benchmark.

    The verdict is on all-reduce, or on the best pair of nodes; None if neither was measured.
    """

    conditions: Conditions
    measured: Sweep | Pairs
    verdict: Verdict | None
    network: RunNetwork

    @property
    def sound(self) -> bool:
        """Whether every result was right and no node or link was slow."""
        if isinstance(self.measured, Sweep):
            return not self.measured.wrong
        return self.measured.diagnosis.healthy and not self.measured.bandwidths.wrong

    def to_json(self) -> str:
        """Return all results as JSON text, for a file."""
        content = {
            "conditions": asdict(self.conditions),
            "verdict": asdict(self.verdict) if self.verdict else None,
            **self.measured.to_dict(),
            "network": json.loads(self.network.to_json()),
        }
        return json.dumps(content, indent=2)


def read_results(content: Mapping[str, Any]) -> Results:
    """The results from the content of the JSON file that `Results.to_json` made.

    Raises:
        BenchError: it is no such file.
    """
    try:
        judged, network = content["verdict"], content["network"]
        results = Results(
            conditions=Conditions(**content["conditions"]),
            measured=_read_pairs(content["pairs"])
            if "pairs" in content
            else Sweep([Measurement(**each) for each in content["collectives"]], dict(content["unavailable"])),
            verdict=judged and Verdict(**{**judged, "expectation": Expectation(**judged["expectation"])}),
            network=RunNetwork(network["backend"], [NodeRecord(**node) for node in network["nodes"]]),
        )
        missing = _missing(results)
    except (TypeError, KeyError, ValueError) as error:
        raise BenchError(f"This is no JSON file of a benchmark ({type(error).__name__}: {error}).") from None
    if missing:
        raise BenchError(
            f"This file of a benchmark lacks {missing[0]}, and {len(missing)} measurement(s) in all: its verdict is of "
            "more than it shows. Give the file as `bench` wrote it, or measure again."
        )
    return results


def _missing(results: Results) -> list[str]:
    """The measurements that a complete file has and this one lacks, or has without a number."""
    measured = results.measured
    if isinstance(measured, Pairs):
        found = measured.bandwidths.bus_bandwidth
        if results.conditions.nodes > len(found) + 1:  # so many pairs may be missing that naming all takes too long
            return [f"pairs of {results.conditions.nodes} nodes, of which it has {len(found)}"]
        pairs = itertools.combinations(range(results.conditions.nodes), 2)
        return [f"nodes {first} and {second}" for first, second in pairs if not _is_number(found.get((first, second)))]
    done = {(each.collective, each.size) for each in measured.measurements if _is_number(each.bus_bandwidth)}
    names = dict.fromkeys(each.collective for each in measured.measurements)
    sizes = sorted({each.size for each in measured.measurements})
    return [f"{name} of {size:,} bytes" for name in names for size in sizes if (name, size) not in done]


def _is_number(bandwidth: float | None) -> bool:
    return bandwidth is not None and math.isfinite(bandwidth)


def _read_pairs(content: Mapping[str, Any]) -> Pairs:
    measured = {tuple(each["nodes"]): each for each in content["bandwidths"]}
    bandwidths = {pair: each["bus_bandwidth"] for pair, each in measured.items()}
    wrong = tuple(pair for pair, each in measured.items() if each["wrong"])
    found = content["diagnosis"]
    links = tuple(tuple(link) for link in found["slow_links"])
    diagnosis = Diagnosis(found["usual"], found["threshold"], tuple(found["slow_nodes"]), links)
    return Pairs(content["size"], PairBandwidths(bandwidths, wrong), diagnosis)


def log_results(results: Results, files: Sequence[Path]) -> None:
    """Log the results into the run that MLFLOW_RUN_ID names; without that variable, log nothing. The run stays open.

    The step of each metric, such as `bench/all-reduce/bus_bandwidth_GBps`, is the message size in bytes. The files
    become artifacts. If the store fails, there is a warning and no exception.
    """
    run_id = os.environ.get("MLFLOW_RUN_ID")
    if not run_id:
        return
    try:
        run = join_run(resolve_tracking_uri(None), run_id)
        for batch in make_batches(_records(results)):
            arguments: dict[str, Any] = {batch.kind: batch.items}
            run.client.log_batch(run_id, **arguments)
        for path in files:
            run.client.log_artifact(run_id, str(path), _FOLDER)
    except Exception as error:  # of any kind: the results are already printed and in a file
        text = redact_text(f"{type(error).__name__}: {error}")
        warnings.warn(f"The results were not all logged into run {run_id}: {text}", stacklevel=2)


def _records(results: Results) -> Iterator[Record]:
    now = int(1000 * time.time())
    if isinstance(results.measured, Pairs):
        pairs = results.measured
        for (first, second), bandwidth in pairs.bandwidths.bus_bandwidth.items():
            values = {f"{_FOLDER}/pairs/{first}-{second}/bus_bandwidth_GBps": bandwidth}
            yield Metrics(values, pairs.size, now)
    else:
        for each in results.measured.measurements:
            prefix = f"{_FOLDER}/{each.collective}"
            values = {
                f"{prefix}/bus_bandwidth_GBps": each.bus_bandwidth,
                f"{prefix}/algorithm_bandwidth_GBps": each.algorithm_bandwidth,
                f"{prefix}/median_s": each.median_s,
                f"{prefix}/wrong_elements": each.wrong,
            }
            yield Metrics(values, each.size, now)
    if results.verdict:
        yield Tags({f"{_FOLDER}.verdict": results.verdict.word, **results.network.tags})
