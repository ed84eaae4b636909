"""Reads fitted.toml: the planner's numbers that are fitted or published, with their sources."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from azureml_strategy.network.vm_sizes import bare_name
from azureml_strategy.planning.kernels import Efficiency
from azureml_strategy.planning.networks import Family, Network

_MICRO = 1e-6
_SAME_FLOPS = 0.01  # of two descriptions of one network, relative: a module counts what a name leaves out


@dataclass(frozen=True)
class TierDefaults:
    """What a kind of link costs where nothing is known of the size.

    Attributes:
        latency_s: of a message.
        efficiency: share of the line rate that large messages reach.
        slowdown: share by which computation is slower while it carries traffic.
    """

    latency_s: float
    efficiency: float
    slowdown: float


@dataclass(frozen=True)
class Link:
    """Collectives on some VM sizes as published figures show them.

    Attributes:
        inside: bus bandwidth of one node, in bytes per second.
        across: the same of several nodes.
        latency_s: of a message between nodes.
        slowdown: as in `Tier`.
        overhead_s: added to each step with more than one GPU.
    """

    inside: float
    across: float
    latency_s: float
    slowdown: float
    overhead_s: float
    source: str


@dataclass(frozen=True)
class Anchor:
    """A measured rate of one GPU, by which the roofline is corrected for the same GPU and precision.

    Attributes:
        gpu: model, as in gpus.toml.
        network: a name that `named_network` knows.
        samples_per_second: of a training step; for a network of tokens, sequences.
        batch: samples of a step.
    """

    gpu: str
    network: str
    family: Family
    precision: str
    compiled: bool
    batch: float
    samples_per_second: float
    source: str


@dataclass(frozen=True)
class Shares:
    """Shares of the peaks that are other than those of most GPUs.

    Attributes:
        models: of the GPUs, as in gpus.toml.
        precision: at which they hold.
        convolution: as in `Efficiency`; Winograd's algorithm takes fewer operations than
            are counted, so it may exceed 1.
        memory: the same.
    """

    models: tuple[str, ...]
    precision: str
    convolution: float
    memory: float


ComputeKey = tuple[str, Family, str, bool]
"""Model of the GPU, family of the network, precision, and whether it was compiled."""
LinkKey = tuple[str, str]
"""Short name of a VM size, and `infiniband` or `ethernet`."""


@dataclass(frozen=True)
class SeenNetwork:
    """A network that a run trained, as far as it must be known again.

    Attributes:
        name: for a reader.
        parameters: elements that are trained.
        flops: of a forward and backward pass for one sample.
    """

    name: str
    parameters: int
    flops: float

    def is_same(self, network: Network) -> bool:
        """Whether it is this network, by whatever name."""
        same_flops = abs(self.flops - network.flops) <= _SAME_FLOPS * network.flops
        return self.parameters == network.parameters and same_flops


@dataclass(frozen=True)
class Correction:
    """What a user's runs say of the computation on a GPU.

    Attributes:
        factor: by which a step's kernels take longer than without it.
        error: relative error to expect of computation, of the networks and batches of the runs.
        source: the runs.
        networks: that the runs trained.
        smallest_batch: of the runs, in samples of a GPU.
        largest_batch: the same.
    """

    factor: float
    error: float
    source: str
    networks: tuple[SeenNetwork, ...] = ()
    smallest_batch: float = 0.0
    largest_batch: float = 0.0

    def error_of(self, network: Network, batch_size: float, beyond: float) -> float:
        """The relative error to expect of a network's computation.

        Args:
            network: whose computation it is.
            batch_size: samples of a GPU.
            beyond: error to add where the network is none of the runs', or the batch is outside of their range.
        """
        seen = any(each.is_same(network) for each in self.networks)
        within = self.smallest_batch <= batch_size <= self.largest_batch
        return self.error if seen and within else math.hypot(self.error, beyond)


@dataclass(frozen=True)
class Adjustment:
    """What a user's runs say of the links of a VM size: factors on what is known of them without these runs.

    Attributes:
        inside: of the bandwidth inside a node.
        across: of the bandwidth between nodes.
        latency: of a message's latency between nodes.
        slowdown: of the odds of the slowdown s, which are s / (1 - s), so that it stays below 1.
        skew: of the wait for the slowest rank.
        error: relative error to expect of what communication between nodes adds; None for that of the network.
        inside_error: the same inside a node.
        source: the runs.
    """

    inside: float = 1.0
    across: float = 1.0
    latency: float = 1.0
    slowdown: float = 1.0
    skew: float = 1.0
    error: float | None = None
    inside_error: float | None = None
    source: str = ""


@dataclass(frozen=True)
class Parameters:
    """All fitted numbers.

    Attributes:
        efficiency: of most GPUs.
        shares: of the others.
        optimizer_bytes: that the optimizer moves for each parameter, by its kind.
        tiers: by the first words of a link's name.
        links: by VM size and network (`infiniband` or `ethernet`), of sizes with published figures.
        anchors: measured rates.
        skew: share of a step by which one rank's time differs from another's.
        errors: relative errors that the model had on measurements that it was not fitted to, by what is not known.
        name: of the calibration, for messages.
        corrections: of the computation, by a user's own runs.
        adjustments: of the links, by the same.
    """

    efficiency: Efficiency
    shares: tuple[Shares, ...]
    optimizer_bytes: Mapping[str, float]
    tiers: Mapping[str, TierDefaults]
    links: Mapping[LinkKey, Link]
    anchors: tuple[Anchor, ...]
    skew: float
    errors: Mapping[str, float]
    name: str = "fitted.toml"
    corrections: Mapping[ComputeKey, Correction] = field(default_factory=dict)
    adjustments: Mapping[LinkKey, Adjustment] = field(default_factory=dict)

    def efficiency_of(self, model: str, precision: str) -> Efficiency:
        """What a model of GPU reaches at a precision."""
        for each in self.shares:
            if model in each.models and precision == each.precision:
                return replace(self.efficiency, convolution=each.convolution, memory=each.memory)
        return self.efficiency


@cache
def default_parameters() -> Parameters:
    """The parameters that come with the planner."""
    text = files("azureml_strategy.planning").joinpath("fitted.toml").read_text(encoding="utf-8")
    return read_parameters(tomllib.loads(text))


def read_parameters(content: Mapping[str, Any]) -> Parameters:
    """Read parameters from the content of a file like fitted.toml.

    Raises:
        KeyError: a part is missing.
    """
    compute = content["compute"]
    shares = {name: compute[name] for name in ("convolution", "product", "unaligned", "attention", "memory")}
    times = {f"{name}_s": compute[f"{name}_us"] * _MICRO for name in ("kernel", "host", "compiled_host")}
    return Parameters(
        efficiency=Efficiency(**shares, **times),
        shares=tuple(Shares(**each | {"models": tuple(each["models"])}) for each in content.get("shares", ())),
        optimizer_bytes=content["optimizer"],
        tiers={
            each["name"]: TierDefaults(each["latency_us"] * _MICRO, each["efficiency"], each["slowdown"])
            for each in content["tiers"]
        },
        links=dict(_links(each) for part in content.get("links", ()) for each in _each_size(part)),
        anchors=tuple(Anchor(**each) for each in content.get("anchors", ())),
        skew=content["skew"]["share"],
        errors=content["errors"],
    )


def _each_size(part: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(size, part) for size in part["sizes"]]


def _links(given: tuple[str, Mapping[str, Any]]) -> tuple[tuple[str, str], Link]:
    size, part = given
    link = Link(
        inside=part["inside_gb"] * 1e9,
        across=part["across_gb"] * 1e9,
        latency_s=part["latency_us"] * _MICRO,
        slowdown=part["slowdown"],
        overhead_s=part["overhead_ms"] * 1e-3,
        source=part["source"],
    )
    return (bare_name(size).lower(), part["network"]), link
