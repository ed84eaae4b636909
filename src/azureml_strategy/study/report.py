"""Shows a study as a table and as a picture."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from azureml_strategy.cluster.job import count, format_money
from azureml_strategy.study.options import StudyOptions
from azureml_strategy.study.scaling import Row, Scaling
from azureml_strategy.tracking.tables import print_table
from azureml_strategy.tracking.verdict import mfu_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Column(NamedTuple):
    """A heading, and the function that gives the text of a row. A column without any text is left out."""

    heading: str
    value: Callable[[Row], str]


def print_study(scaling: Scaling, options: StudyOptions, files: Sequence[Path]) -> None:
    """Print the table, remarks about it, and the paths of the written files."""
    table = Table()
    columns = study_columns(scaling)
    for column in columns:
        table.add_column(column.heading, justify="left" if column.heading in ("transport", "result") else "right")
    for row in scaling.rows:
        table.add_row(*(column.value(row) or "-" for column in columns))
    print()
    print_table(table, [*_remarks(scaling, options), f"Written: {', '.join(map(str, files))}"], width=120)


def study_columns(scaling: Scaling) -> list[Column]:
    """The columns of the table in which some row has a text."""
    unit = scaling.unit
    columns = [
        Column("nodes", lambda row: _text(row.figures.nodes, "d")),
        Column("devices", lambda row: _text(row.figures.devices, "d")),
        Column(f"{unit}/s", lambda row: _text(row.figures.samples_per_second, ",.1f")),
        Column(f"planned {unit}/s", lambda row: _text(row.figures.expected_samples_per_second, ",.1f")),
        Column("error", lambda row: _text(row.figures.prediction_error, "+.0%")),
        Column("per device", lambda row: _text(row.figures.per_device, ",.1f")),
        Column("speed-up", lambda row: _text(row.speed_up, ".2f")),
        Column("efficiency", lambda row: _text(row.efficiency, ".1%")),
        Column("MFU", lambda row: "" if row.figures.mfu is None else mfu_text(row.figures.mfu)),
        Column(f"{scaling.currency} per 10^6 {unit}", _cost),
        Column("transport", lambda row: row.figures.transport or ""),
        Column("result", lambda row: row.figures.problem),
    ]
    return [each for each in columns if any(each.value(row) for row in scaling.rows)]


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _cost(row: Row) -> str:
    cost = row.figures.cost_per_million_samples
    return "" if cost is None else format_money(cost)


def _remarks(scaling: Scaling, options: StudyOptions) -> list[str]:
    lines = []
    if scaling.base:
        size = count(scaling.base.devices or 0, "device")
        lines.append(f"Speed-up and efficiency are against the smallest, {size}. The batch of a device stays the same.")
    if any(row.figures.prediction_error is not None for row in scaling.rows):
        lines.append("Planned is what the planner expected (docs/plan.md); the error is planned / measured - 1.")
    lines.append(f"Runs, from above: {','.join(row.figures.run_id or '-' for row in scaling.rows)}")
    if scaling.measured:
        lines.append(f"{scaling.measured}: picture, speed-up and efficiency are without the others.")
    if scaling.differences:
        shown = [f"{name} ({', '.join(values)})" for name, values in list(scaling.differences.items())[:5]]
        lines.append(f"The runs differ in more than size: {'; '.join(shown)}.")
    lines.extend(scaling.failures)
    if scaling.emulated or options.local:
        cores = f"this machine's {os.cpu_count()} cores" if options.local else "the cores of one machine"
        lines.append(
            f"Emulated: all nodes share {cores} and its memory. The figures show what "
            "the processes cost one another there, not what a cluster will do."
        )
    if scaling.base and scaling.currency is None:
        lines.append(
            "No cost: no run knows a price. Give --price-per-hour, or cluster.price_per_hour to the next ones."
        )
    return lines


def plot(scaling: Scaling, title: str) -> bytes:
    """A PNG file: throughput with perfect scaling, efficiency, and cost if known, over the number of devices."""
    from matplotlib.figure import Figure

    drawn = panels(scaling)
    figure = Figure(figsize=(4.5 * len(drawn), 4), layout="constrained")
    figure.suptitle(title)
    for position, draw in enumerate(drawn.values(), start=1):
        axes = figure.add_subplot(1, len(drawn), position)
        draw(axes)
        axes.set_xlabel("devices")
        axes.grid(alpha=0.3)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def panels(scaling: Scaling) -> dict[str, Callable[[Axes], None]]:
    """The functions that draw the panels of the picture, by title; each panel is over the number of devices."""
    draws = {"Throughput": _draw_throughput, "Scaling efficiency": _draw_efficiency}
    if scaling.currency:
        draws["Cost"] = _draw_cost
    return {title: partial(_draw_panel, draw, scaling) for title, draw in draws.items()}


def _draw_panel(draw: Callable[[Axes, Scaling], None], scaling: Scaling, axes: Axes) -> None:
    draw(axes, scaling)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)


def _draw_throughput(axes: Axes, scaling: Scaling) -> None:
    devices, rates = _points(scaling, lambda row: row.figures.samples_per_second)
    axes.plot(devices, rates, marker="o", label="measured")
    if scaling.base and scaling.base.per_device:
        axes.plot(devices, [scaling.base.per_device * each for each in devices], "k--", label="perfect scaling")
        planned = _points(scaling, lambda row: row.figures.expected_samples_per_second)
        if planned[0]:
            axes.plot(*planned, "x:", label="planned")
        axes.legend()
    axes.set_ylabel(f"{scaling.unit}/s")


def _draw_efficiency(axes: Axes, scaling: Scaling) -> None:
    devices, efficiencies = _points(scaling, lambda row: row.efficiency)
    axes.plot(devices, [100 * each for each in efficiencies], marker="o")
    axes.axhline(100, linestyle="--", color="black")
    axes.set_ylabel("scaling efficiency, %")


def _draw_cost(axes: Axes, scaling: Scaling) -> None:
    axes.plot(*_points(scaling, lambda row: row.figures.cost_per_million_samples), marker="o")
    axes.set_ylabel(f"{scaling.currency} per 10^6 {scaling.unit}")


def _points(scaling: Scaling, value: Callable[[Row], float | None]) -> tuple[list[int], list[float]]:
    """Devices and values of the rows that have both."""
    known = [(row.figures.devices, value(row)) for row in scaling.rows]
    points = [(devices, number) for devices, number in known if devices is not None and number is not None]
    return [devices for devices, _ in points], [number for _, number in points]
