"""Joins the job's processes in a process group, plans the measurement, and runs it up to the report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from azureml_strategy.bench.collectives import COLLECTIVES, Place
from azureml_strategy.bench.measure import Measurement, Procedure, Unavailable, diagnose, measure, measure_pairs
from azureml_strategy.bench.options import BenchError, BenchOptions, format_size
from azureml_strategy.bench.report import plot, print_results
from azureml_strategy.bench.results import (
    Conditions,
    Expectation,
    Pairs,
    Results,
    Sweep,
    Verdict,
    expect,
    judge,
    log_results,
)
from azureml_strategy.cluster import Launch, learn_launch
from azureml_strategy.files import write_atomically
from azureml_strategy.lazy import require_library
from azureml_strategy.network.session import NetworkSession, prepare_network

# Largest share of a device's memory for one message: most collectives need a second buffer as large.
_SHARE = 0.4
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
class Member:
    """This process in the job's process group, with its place in the job and the network setup of the group."""

    launch: Launch
    place: Place
    backend: str
    session: NetworkSession

    @property
    def idle_gpus(self) -> int:
        """GPUs of this node that no process of the job uses."""
        used = self.launch.local_world_size
        return max(0, torch.cuda.device_count() - used) if self.backend == "nccl" else 0

    def largest_message(self) -> int:
        """Return the bytes of the largest message that fits on every process's device. Every process must call it."""
        if self.place.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.place.device)
        else:
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // self.launch.local_world_size
        return int(self.place.lowest([_SHARE * free])[0])


def require_launch() -> Launch:
    """Return this process's place in the job.

    Raises:
        BenchError: this is not a process of a job, or the job has only one process.
        LaunchError: the job's variables cannot be trusted.
    """
    launch = learn_launch()
    if launch is None or launch.world_size == 1:
        found = "this is no process of a job" if launch is None else "this job has one process"
        raise BenchError(
            f"bench measures what the processes of a job send one another, and {found}. Make it the command of a job "
            "with several processes, or try it here: azureml-strategy emulate --nodes 2 -- azureml-strategy bench"
        )
    return launch


@contextmanager
def join(launch: Launch, backend: str | None, timeout: timedelta) -> Iterator[Member]:
    """Start the process group of the job, and destroy it at the end of the block.

    Without a backend it is NCCL if there is a GPU, else gloo. The timeout is the limit for the other processes to join,
    and for each collective.

    Raises:
        BenchError: this process has no GPU, and NCCL needs one.
        LaunchError: processes are missing.
    """
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = _cuda_device(launch) if backend == "nccl" else torch.device("cpu")
    session = prepare_network(launch, backend, timeout)
    dist.init_process_group(
        backend,
        init_method=f"tcp://{launch.main_address}:{launch.main_port}",
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
    )
    try:
        yield Member(launch, Place(launch.rank, launch.world_size, device), backend, session)
    finally:
        dist.destroy_process_group()


def _cuda_device(launch: Launch) -> torch.device:
    visible = torch.cuda.device_count()
    # A launcher may show each process only its own GPU.
    index = 0 if visible == 1 else launch.local_rank
    if index >= visible:
        raise BenchError(
            f"Process {launch.local_rank} of this node has no GPU of its own: {visible} can be seen here. Start as "
            "many processes as a node has GPUs (process_count_per_instance), or measure with --backend gloo."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


@dataclass(frozen=True)
class Plan:
    """What one run measures: collectives at sizes in bytes, ascending; between pairs, all-reduce at one size."""

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
    backend, device = member.backend, member.place.device
    cuda = device.type == "cuda"
    conditions = Conditions(
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
    return Plan(
        conditions=conditions,
        collectives=["all-reduce"] if options.pairs else options.collectives or list(COLLECTIVES),
        sizes=_sizes(options, backend, member.largest_message()),
        procedure=Procedure(getattr(torch, options.dtype), conditions.iterations, conditions.warmup),
        expectation=expect(
            member.session.node.vm_size,
            backend=backend,
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


def run_bench(options: BenchOptions) -> int:
    """Measure as one process of a job. All processes must call it with the same options.

    Rank 0 prints and records the results.

    Returns:
        The exit code: 1 on rank 0 if a collective gave a wrong result, or a node or a link is slow.

    Raises:
        BenchError: this is not a job of several processes, or the job cannot be measured as asked.
        LaunchError: the job's variables cannot be trusted, or processes are missing.
    """
    launch = require_launch()
    require_library("matplotlib")
    if options.pairs and launch.num_nodes == 1:
        raise BenchError("--pairs compares nodes, and this job has one. Leave it out, or take more nodes.")
    timeout = timedelta(seconds=options.timeout_s)
    with join(launch, options.backend, timeout) as member:
        plan = make_plan(options, member)
        if launch.rank == 0:
            print_start(plan, member.idle_gpus)
        measured = _measure_pairs(plan, member, timeout) if options.pairs else _sweep(plan, member)
        network = member.session.observe()
    if network is None:
        return 0  # a failure code of another rank could end the job before rank 0 has recorded the results
    results = Results(plan.conditions, measured, _judge(plan, measured), network)
    files = [options.output, options.plot]
    for path, content in zip(files, (results.to_json().encode(), plot(results)), strict=True):
        write_atomically(path, content)
    print_results(results, files)
    if options.mlflow:
        log_results(results, files)
    return 0 if results.sound else 1


def print_start(plan: Plan, idle_gpus: int) -> None:
    """Print what will be measured, and how many GPUs of each node take no part."""
    conditions = plan.conditions
    sizes = " to ".join(format_size(size) for size in dict.fromkeys((plan.sizes[0], plan.sizes[-1])))
    print(
        f"Measuring {', '.join(plan.collectives)} of {sizes}: {conditions.nodes} node(s) x "
        f"{conditions.processes_per_node} process(es), {conditions.backend} on {conditions.device}, "
        f"{conditions.iterations} iterations after {conditions.warmup} of warm-up.",
        flush=True,
    )
    if idle_gpus:
        print(
            f"Only {conditions.processes_per_node} GPU(s) of each node take part, {idle_gpus} do not: set the job's "
            f"process_count_per_instance to {conditions.processes_per_node + idle_gpus} to measure what a node has.",
            flush=True,
        )


def _sweep(plan: Plan, member: Member) -> Sweep:
    measurements: list[Measurement] = []
    unavailable: dict[str, str] = {}
    for name in plan.collectives:
        try:
            measurements += [measure(COLLECTIVES[name], member.place, size, plan.procedure) for size in plan.sizes]
        except Unavailable as refusal:
            unavailable[name] = str(refusal).splitlines()[0]
    return Sweep(measurements, unavailable)


def _measure_pairs(plan: Plan, member: Member, timeout: timedelta) -> Pairs:
    (size,) = plan.sizes
    try:
        bandwidths = measure_pairs(member.place, plan.conditions.nodes, size, plan.procedure, timeout)
    except Unavailable as refusal:
        raise BenchError(f"{member.backend} has no all-reduce of {plan.conditions.dtype}: {refusal}") from refusal
    # No pair reaches the line rate: one that has less than 80 % of it may be healthy.
    expected = None if plan.expectation.is_line_rate else plan.expectation.bandwidth
    return Pairs(size, bandwidths, diagnose(bandwidths.bus_bandwidth, expected))


def _judge(plan: Plan, measured: Sweep | Pairs) -> Verdict | None:
    """Judge all-reduce at its largest size, as health checks do. Of pairs, judge the best one."""
    if isinstance(measured, Pairs):
        return judge(max(measured.bandwidths.bus_bandwidth.values()), plan.expectation, in_ring=False)
    largest = measured.largest("all-reduce")
    return judge(largest.bus_bandwidth, plan.expectation, in_ring=plan.conditions.nodes > 1) if largest else None
