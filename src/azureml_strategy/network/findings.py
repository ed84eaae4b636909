"""The result of one check, and the checks of the hardware: what a VM size promises and the container does not show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from azureml_strategy.network.infiniband import HCA
from azureml_strategy.network.node import Node

Verdict = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One fact with its verdict.

    Attributes:
        verdict: `ok`, `warning` (slower or at risk) or `problem` (does not work).
        subject: what it is about, such as `InfiniBand` or a variable's name.
        text: what was seen and what follows from it, with numbers.
        advice: what to do; None if nothing needs to be done.
    """

    verdict: Verdict
    subject: str
    text: str
    advice: str | None = None

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}" + (f" {self.advice}" if self.advice else "")


# A queue pair with its buffers takes some megabytes; Docker's default limit is 64 KiB or 8 MiB.
_ENOUGH_MEMLOCK = 1 << 30


def find_faults(node: Node) -> Iterator[Finding]:
    """Find faults of InfiniBand, limits and GPUDirect; none if the node neither has InfiniBand nor should have it."""
    expected = node.vm_size is not None and node.vm_size.infiniband
    if node.usable_hcas:
        yield from _degraded(node)
    elif expected:
        yield _unusable(node)
    if node.usable_hcas or expected:
        yield from _limits(node)


def total_gbytes(node: Node, hcas: Iterable[HCA] | None = None) -> float:
    """Total rate of the adapters, by default of all usable ones, in each direction, in GB/s.

    0 if neither they nor the VM size state a rate.
    """
    promised = (node.vm_size and node.vm_size.hca_gbps) or 0
    return sum(hca.rate_gbps or promised for hca in (node.usable_hcas if hcas is None else hcas)) / 8


def _unusable(node: Node) -> Finding:
    assert node.vm_size is not None
    faults = [f"{', '.join(names)}: {fault}" for fault, names in _faults(node).items()]
    if faults:
        text, advice = f"no port is usable: {'; '.join(faults)}.", _repair(node)
    else:
        text = "the container sees no InfiniBand adapter."
        advice = (
            "Run the job on AmlCompute, which passes the devices on; elsewhere give the container /dev/infiniband "
            "(`docker_args: --device=/dev/infiniband`)."
        )
    return Finding("problem", "InfiniBand", f"{node.vm_size.name} has InfiniBand, but {text}", advice)


def _faults(node: Node) -> dict[str, list[str]]:
    """The adapters that have each fault of an InfiniBand port."""
    faults: dict[str, list[str]] = {}
    for hca in node.hcas:
        if hca.is_infiniband and hca.fault:
            faults.setdefault(hca.fault, []).append(hca.name)
    return faults


def _repair(node: Node) -> str:
    hcas = [hca for hca in node.hcas if hca.is_infiniband]
    if any(hca.state != "ACTIVE" for hca in hcas):
        return "The node's link is down: replace the node (restart the job with a fresh one), and report it to Azure."
    if any(hca.full_pkey is None for hca in hcas):
        return "The node has not joined the cluster's partition: replace the node."
    return "Give the container /dev/infiniband (`docker_args: --device=/dev/infiniband` in the job's `resources`)."


def _degraded(node: Node) -> Iterator[Finding]:
    usable, size = len(node.usable_hcas), node.vm_size
    left = "the others carry its share"
    if size is not None and size.infiniband and size.hcas:
        share = f"all-reduce reaches at most {usable / size.hcas:.0%} of its bandwidth"
        left = f"{usable} of the {size.hcas} adapters of {size.name} are usable, {share}"
    for fault, names in _faults(node).items():
        yield Finding("problem", f"InfiniBand {', '.join(names)}", f"{fault}; {left}.", _repair(node))
    if size is None or not size.infiniband:
        return
    if size.hcas and sum(hca.is_infiniband for hca in node.hcas) < size.hcas:
        advice = "The node lacks adapters: replace the node, and report it to Azure."
        yield Finding("problem", "InfiniBand", f"{left}.", advice)
    for hca in node.usable_hcas:
        if size.hca_gbps and hca.rate_gbps and hca.rate_gbps < size.hca_gbps:
            yield Finding(
                "problem",
                f"InfiniBand {hca.name}",
                f"its link runs at {hca.rate_gbps:g} Gb/s instead of {size.hca_gbps:g} Gb/s; a ring is as fast as its "
                "slowest link.",
                "Replace the node, and report it to Azure.",
            )


def _limits(node: Node) -> Iterator[Finding]:
    if node.memlock is not None and node.memlock < _ENOUGH_MEMLOCK:
        yield Finding(
            "problem",
            "locked memory",
            f"the limit is {node.memlock / 1024:.0f} KiB, and NCCL registers its buffers with the adapters: "
            "`ibv_create_cq` or `ibv_reg_mr` will fail.",
            "Add `docker_args: --ulimit memlock=-1 --cap-add=IPC_LOCK` to the job's `resources`.",
        )
    if node.gpus.vendor is not None and node.gpudirect is None:
        yield Finding(
            "warning",
            "GPUDirect RDMA",
            "no nvidia_peermem module and no open GPU driver was found, so data goes through the host's memory.",
            "Run `modprobe nvidia_peermem` on your own nodes; on AmlCompute, recreate the cluster on a current image.",
        )
