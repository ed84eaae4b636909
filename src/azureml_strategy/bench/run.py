"""Runs the benchmark, from the job's variables to the report."""

from __future__ import annotations

from datetime import timedelta

from azureml_strategy.bench.collectives import COLLECTIVES
from azureml_strategy.bench.measure import Measurement, Unavailable, measure
from azureml_strategy.bench.members import Member, join, require_launch
from azureml_strategy.bench.options import BenchError, BenchOptions
from azureml_strategy.bench.pairs import diagnose, measure_pairs
from azureml_strategy.bench.plan import Plan, make_plan
from azureml_strategy.bench.report import plot, print_results, print_start
from azureml_strategy.bench.results import Pairs, Results, Sweep, log_results, write_atomically
from azureml_strategy.bench.verdict import Verdict, judge
from azureml_strategy.lazy import require_library


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
    _record(results, options)
    return 0 if results.sound else 1


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
    """Judge all-reduce at its largest size, as health checks do; of pairs, judge the best one."""
    if isinstance(measured, Pairs):
        return judge(max(measured.bandwidths.bus_bandwidth.values()), plan.expectation, in_ring=False)
    largest = measured.largest("all-reduce")
    return judge(largest.bus_bandwidth, plan.expectation, in_ring=plan.conditions.nodes > 1) if largest else None


def _record(results: Results, options: BenchOptions) -> None:
    files = [options.output, options.plot]
    for path, content in zip(files, (results.to_json().encode(), plot(results)), strict=True):
        write_atomically(path, content)
    print_results(results, files)
    if options.mlflow:
        log_results(results, files)
