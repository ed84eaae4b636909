"""Pictures of the results."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from azureml_strategy.benching.results import Pairs, Results, Sweep
from azureml_strategy.benching.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(results: Results) -> bytes:
    """Bus bandwidth over message size, a line for each collective; for pairs, a square for each two nodes.

    Returns:
        A PNG file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    conditions = results.conditions
    axes.set_title(f"{conditions.backend}, {conditions.nodes} x {conditions.processes_per_node} {conditions.device}")
    if isinstance(results.measured, Sweep):
        _draw_sweep(axes, results.measured)
        _draw_expectation(axes, results)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    else:
        _draw_pairs(axes, results.measured, conditions.nodes)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


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


def _draw_expectation(axes: Axes, results: Results) -> None:
    expected = results.verdict.expectation.bandwidth if results.verdict else None
    if expected is not None:
        axes.axhline(expected, linestyle="--", color="black", label="expected of all-reduce")


def _draw_pairs(axes: Axes, pairs: Pairs, nodes: int) -> None:
    squares = [[float("nan")] * nodes for _ in range(nodes)]
    for (first, second), bandwidth in pairs.bandwidths.bus_bandwidth.items():
        squares[first][second] = squares[second][first] = bandwidth
    image = axes.imshow(squares, vmin=0)
    axes.figure.colorbar(image, label=f"all-reduce of {format_size(pairs.size)}: bus bandwidth, GB/s")
    axes.set_xlabel("node")
    axes.set_ylabel("node")
    axes.locator_params(integer=True)
