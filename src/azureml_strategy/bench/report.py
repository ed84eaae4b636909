"""Prints the results of the benchmark as a table, and draws them as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from azureml_strategy.bench.options import format_size
from azureml_strategy.bench.results import Pairs, Results, Sweep
from azureml_strategy.tracking.tables import print_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# If there are more pairs, only slow and wrong ones are printed; the file has all.
_MOST_PAIRS = 28


def plot(results: Results) -> bytes:
    """A PNG file: bus bandwidth over message size, one line per collective; for pairs, one square per two nodes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    conditions = results.conditions
    axes.set_title(f"{conditions.backend}, {conditions.nodes} x {conditions.processes_per_node} {conditions.device}")
    draw(axes, results)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def draw(axes: Axes, results: Results) -> None:
    """Draw the picture on axes of any figure."""
    if isinstance(results.measured, Sweep):
        _draw_sweep(axes, results.measured)
        expected = results.verdict.expectation.bandwidth if results.verdict else None
        if expected is not None:
            axes.axhline(expected, linestyle="--", color="black", label="expected of all-reduce")
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    else:
        _draw_pairs(axes, results.measured, results.conditions.nodes)


def _draw_sweep(axes: Axes, sweep: Sweep) -> None:
    for name in dict.fromkeys(each.collective for each in sweep.measurements):
        points = [each for each in sweep.measurements if each.collective == name]
        axes.plot([each.size for each in points], [each.bus_bandwidth for each in points], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda size, position: format_size(round(size)))
    axes.set_xlabel("message size")
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _draw_pairs(axes: Axes, pairs: Pairs, nodes: int) -> None:
    squares = [[float("nan")] * nodes for _ in range(nodes)]
    for (first, second), bandwidth in pairs.bandwidths.bus_bandwidth.items():
        squares[first][second] = squares[second][first] = bandwidth
    image = axes.imshow(squares, vmin=0)
    axes.figure.colorbar(image, label=f"all-reduce of {format_size(pairs.size)}: bus bandwidth, GB/s")
    axes.set_xlabel("node")
    axes.set_ylabel("node")
    axes.locator_params(integer=True)


def print_results(results: Results, files: Sequence[Path]) -> None:
    """Print the table, the verdict and the names of the files that were written."""
    sweep = results.measured
    table = _sweep_table(sweep, results) if isinstance(sweep, Sweep) else _pairs_table(sweep)
    print_table(table, [*remarks(results), f"Written: {', '.join(map(str, files))}"])


def _sweep_table(sweep: Sweep, results: Results) -> Table:
    table = Table("collective", title=None)
    for column in ("size", "median ms", "p95 ms", "algorithm GB/s", "bus GB/s", "result"):
        table.add_column(column, justify="right")
    for each in sweep.measurements:
        times = [f"{1e3 * seconds:.3f}" for seconds in (each.median_s, each.p95_s)]
        bandwidths = [_digits(bandwidth) for bandwidth in (each.algorithm_bandwidth, each.bus_bandwidth)]
        result = "WRONG" if each.wrong else "right"
        table.add_row(each.collective, format_size(each.size), *times, *bandwidths, result)
    for name in sweep.unavailable:
        table.add_row(name, *[""] * 5, f"not available on {results.conditions.backend}")
    return table


def _digits(bandwidth: float) -> str:
    return f"{bandwidth:.4f}" if bandwidth < 10 else f"{bandwidth:.1f}"


def _pairs_table(pairs: Pairs) -> Table:
    table = Table("nodes", title=None)
    for column in ("bus GB/s", "result"):
        table.add_column(column, justify="right")
    threshold = pairs.diagnosis.threshold or 0.0
    for pair, bandwidth in pairs.bandwidths.bus_bandwidth.items():
        is_wrong, is_slow = pair in pairs.bandwidths.wrong, bandwidth < threshold
        if is_wrong or is_slow or len(pairs.bandwidths.bus_bandwidth) <= _MOST_PAIRS:
            words = [word for word, holds in (("WRONG", is_wrong), ("slow", is_slow)) if holds]
            table.add_row(f"{pair[0]} - {pair[1]}", _digits(bandwidth), ", ".join(words) or "right")
    return table


def remarks(results: Results) -> list[str]:
    """The network, the verdict, and what was wrong or slow, a sentence each."""
    lines = [results.network.line]
    if results.verdict:
        lines.append(f"Verdict: {results.verdict.text}")
    if isinstance(results.measured, Pairs):
        return [*lines, *_diagnosis(results.measured, [node.host for node in results.network.nodes])]
    for name, words in results.measured.unavailable.items():
        lines.append(f"{name} is not available: {words}")
    for each in results.measured.wrong:
        found = f"{each.wrong} of {each.checked} elements that were compared differ from the float64 result"
        lines.append(f"WRONG: {each.collective} at {format_size(each.size)}: {found}. Do not train on these nodes.")
    return lines


def _diagnosis(pairs: Pairs, hosts: Sequence[str]) -> list[str]:
    found = pairs.diagnosis
    if found.usual is None:
        return ["Two nodes have nothing to be compared with but an expected value: give --expect GB/s, or more nodes."]
    limit = f"below {found.threshold:.4g} GB/s, 80 % of the usual {found.usual:.4g}"
    lines = [f"Slow node: {node} ({hosts[node]}): all its pairs are {limit}." for node in found.slow_nodes]
    for first, second in found.slow_links:
        lines.append(f"Slow link: node {first} ({hosts[first]}) - node {second} ({hosts[second]}): {limit}.")
    for first, second in pairs.bandwidths.wrong:
        lines.append(f"WRONG: all-reduce between node {first} ({hosts[first]}) and node {second} ({hosts[second]}).")
    return lines or [f"No node and no link is slow: no pair is {limit}."]
