"""Plans the measurement once the processes have joined: the user's options, completed with the backend's defaults."""

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
# Azure's health checks of nodes run all-reduce at 8 and 16 GiB; smaller messages saturate gloo's slower networks.
_SIZES = {
    "nccl": [*(64 * _KIB << power for power in range(0, 17, 2)), 8 * _GIB],
    "gloo": [64 * _KIB << power for power in range(0, 11, 2)],
}
_PAIR_SIZES = {"nccl": [_GIB], "gloo": [16 * _MIB]}
# The defaults of nccl-tests at the time of writing were 20 and 1; here the first runs also open connections.
_ITERATIONS = {"nccl": 20, "gloo": 10}
_WARMUP = {"nccl": 5, "gloo": 2}


@dataclass(frozen=True)
class Plan:
    """What one run measures.

    Attributes:
        conditions: the conditions, as reported with the results.
        collectives: names of the collectives; only all-reduce between pairs.
        sizes: message sizes in bytes, ascending; only one between pairs.
        procedure: how to measure each collective.
        expectation: expected bandwidth of all-reduce.
    """

    conditions: Conditions
    collectives: Sequence[str]
    sizes: Sequence[int]
    procedure: Procedure
    expectation: Expectation


def make_plan(options: BenchOptions, member: Member) -> Plan:
    """Complete the options that the user left open. Every process must call it.

    Raises:
        BenchError: a message does not fit into the memory of some process. All processes raise it.
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
    """Return the sizes to measure: none above `largest`, except the smallest default if no default fits."""
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
