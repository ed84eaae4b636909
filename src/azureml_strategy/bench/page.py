"""The page of a benchmark of the network."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from azureml_strategy.bench.options import BenchError, format_size
from azureml_strategy.bench.report import draw, remarks
from azureml_strategy.bench.results import AS_EXPECTED, Pairs, Results, Sweep, read_results
from azureml_strategy.cluster.job import count
from azureml_strategy.reporting.advice import NextStep
from azureml_strategy.reporting.charts import drawn_chart
from azureml_strategy.reporting.page import Page, Section, Table, Tile, figure
from azureml_strategy.reporting.stores import ReportError


def bench_page(content: Mapping[str, Any]) -> Page:
    """Make the page of a benchmark from the content of the JSON file that `bench` wrote.

    Raises:
        ReportError: it is no such file.
    """
    try:
        results = read_results(content)
    except BenchError as error:
        raise ReportError(str(error)) from None
    conditions, judged, measured = results.conditions, results.verdict, results.measured
    x_unit = "message size" if isinstance(measured, Sweep) else "node"
    chart = drawn_chart("GB/s", partial(draw, results=results), x_unit, wide=True)
    return Page(
        title=f"Network of {count(conditions.nodes, 'node')}",
        kicker="Report on a benchmark",
        headline=_headline(results),
        verdict={"Why": judged.expectation.reason} if judged else {},
        verdict_tone="good" if results.sound and judged and judged.word == AS_EXPECTED else "",
        facts=[
            f"{conditions.nodes} x {conditions.processes_per_node} {conditions.device}",
            f"{conditions.backend}, {conditions.dtype}",
            f"torch {conditions.torch}",
            *([conditions.vm_size] if conditions.vm_size else []),
        ],
        tiles=[Tile("all-reduce", f"{figure(judged.measured)} GB/s", judged.word)] if judged else [],
        steps=_steps(results),
        sections=[
            Section("Bus bandwidth", charts=[chart]),
            Section("Measurements", tables=[_table(measured)]),
            Section("What was seen", tables=[Table([[line] for line in remarks(results)])]),
        ],
    )


def _headline(results: Results) -> str:
    if isinstance(results.measured, Pairs) and not results.measured.diagnosis.healthy:
        slow = results.measured.diagnosis
        nodes = [f"node {node} ({results.network.nodes[node].host})" for node in slow.slow_nodes]
        links = [f"the link of nodes {first} and {second}" for first, second in slow.slow_links]
        return f"Slow: {', '.join([*nodes, *links])}."
    if not results.sound:
        return "A collective gave wrong results: do not train on these nodes."
    return f"{results.verdict.text[0].upper()}{results.verdict.text[1:]}." if results.verdict else "Nothing was judged."


def _steps(results: Results) -> list[NextStep]:
    if isinstance(results.measured, Pairs):
        if results.measured.diagnosis.healthy:
            return []
        return [
            NextStep("Replace the slow node", "Run `azureml-strategy doctor` on it first: it may say what is wrong.")
        ]
    if results.verdict and results.verdict.word != AS_EXPECTED and results.conditions.nodes > 1:
        return [NextStep("Find the slow node or link", "`azureml-strategy bench --pairs` compares every two nodes.")]
    return []


def _table(measured: Sweep | Pairs) -> Table:
    if isinstance(measured, Pairs):
        rows = [
            [f"{first} - {second}", figure(bandwidth), "WRONG" if (first, second) in measured.bandwidths.wrong else ""]
            for (first, second), bandwidth in measured.bandwidths.bus_bandwidth.items()
        ]
        return Table(rows, ("nodes", "bus GB/s", ""), numbers=(1,))
    rows = [
        [
            *(each.collective, format_size(each.size), f"{1e3 * each.median_s:.3f}", figure(each.bus_bandwidth)),
            "WRONG" if each.wrong else "right",
        ]
        for each in measured.measurements
    ]
    rows += [[name, "", "", "", f"not available: {reason}"] for name, reason in measured.unavailable.items()]
    return Table(rows, ("collective", "size", "median ms", "bus GB/s", "result"), numbers=(1, 2, 3))
