"""What is measured once it is known with whom: the user's wishes, and what fits the backend where there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from azureml_strategy.bench.collectives import COLLECTIVES
from azureml_strategy.bench.measure import Procedure
from azureml_strategy.bench.members import Member
from azureml_strategy.bench.options import BenchError, BenchOptions, format_size
from azureml_strategy.bench.results import Conditions
from azureml_strategy.bench.verdict import Expectation, expect

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
# Azure's health checks of nodes run all-reduce at 8 and 16 GiB; gloo's slower networks are full at less.
_SIZES = {
    "nccl": [*(64 * _KIB << power for power in range(0, 17, 2)), 8 * _GIB],
    "gloo": [64 * _KIB << power for power in range(0, 11, 2)],
}
_PAIR_SIZES = {"nccl": [_GIB], "gloo": [16 * _MIB]}
# nccl-tests' defaults when this was written were 20 and 1; a first exchange also opens connections here.
_ITERATIONS = {"nccl": 20, "gloo": 10}
_WARMUP = {"nccl": 5, "gloo": 2}


@dataclass(frozen=True)
class Plan:
    """What one run measures.

    Attributes:
        conditions: as the results tell them.
        collectives: names; all-reduce alone between pairs.
        sizes: message sizes in bytes, ascending; one between pairs.
        procedure: how each is measured.
        expectation: of all-reduce.
    """

    conditions: Conditions
    collectives: Sequence[str]
    sizes: Sequence[int]
    procedure: Procedure
    expectation: Expectation


def make_plan(options: BenchOptions, member: Member) -> Plan:
    """Complete what the user left open. Every process must call it.

    Raises:
        BenchError: a message does not fit into some process's memory. The same on every process.
    """
    conditions = _conditions(options, member)
    return Plan(
        conditions=conditions,
        collectives=["all-reduce"] if options.pairs else options.collectives or list(COLLECTIVES),
        sizes=_sizes(options, member.backend, member.largest_message()),
        procedure=Procedure(getattr(torch, options.dtype), conditions.iterations, conditions.warmup),
        expectation=expect(
            member.session.node.vm_size,
            backend=member.backend,
            nodes=2 if options.pairs else member.launch.num_nodes,
            processes_per_node=member.launch.local_world_size,
            given=options.expect,
        ),
    )


def _sizes(options: BenchOptions, backend: str, largest: int) -> Sequence[int]:
    """The sizes to measure, of which none is above `largest`."""
    if options.sizes is None:
        usual = (_PAIR_SIZES if options.pairs else _SIZES)[backend]
        return [size for size in usual if size <= largest] or [min(usual)]
    if options.sizes[-1] > largest:
        raise BenchError(
            f"--sizes: a message of {format_size(options.sizes[-1])} does not fit: some process has memory for "
            f"{format_size(largest)} sent and as much received. Make it smaller."
        )
    return options.sizes[-1:] if options.pairs else options.sizes


def _conditions(options: BenchOptions, member: Member) -> Conditions:
    backend, device = member.backend, member.place.device
    cuda = device.type == "cuda"
    return Conditions(
        backend=backend,
        dtype=options.dtype,
        nodes=member.launch.num_nodes,
        processes_per_node=member.launch.local_world_size,
        device=torch.cuda.get_device_name(device) if cuda else "CPU",
        vm_size=member.session.node.vm_size_name,
        iterations=_ITERATIONS[backend] if options.iterations is None else options.iterations,
        warmup=_WARMUP[backend] if options.warmup is None else options.warmup,
        torch=torch.__version__,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else None,  # type: ignore[no-untyped-call]
    )
