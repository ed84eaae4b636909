"""Judges whether a measured bandwidth is what the hardware should give."""

from __future__ import annotations

from dataclasses import dataclass

from azureml_strategy.network.vm_sizes import VMSize

AS_EXPECTED = "as expected"
BELOW = "below expected"
HALF = "half of expected: one bad node or HCA in the ring"
UNKNOWN_SIZE = "unknown size"
NOTHING_KNOWN = "nothing to compare with"
# A ring is as fast as its slowest link: published runs with one bad node or HCA reached half of the others' bandwidth.
_HALF = (0.4, 0.6)
_ENOUGH = 0.9


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
    """A measured bandwidth, compared with its expectation.

    Attributes:
        word: the verdict.
        measured: bus bandwidth in GB/s.
        expectation: the expectation that it was compared with.
    """

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
    """Return what a job's all-reduce should reach.

    Args:
        size: size of the job's VMs; None if it is not known.
        backend: `nccl` or `gloo`.
        nodes: number of nodes that take part.
        processes_per_node: number of processes on each node.
        given: bandwidth that the user expects, in GB/s.
    """
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
    """Compare a bus bandwidth with its expectation.

    Args:
        measured: bus bandwidth in GB/s.
        expectation: the expected bandwidth.
        in_ring: whether several nodes took part, so that one could slow down the others.
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
