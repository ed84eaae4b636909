"""The study as a picture."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING

from azureml_strategy.studying.scaling import Row, Scaling

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(scaling: Scaling, title: str) -> bytes:
    """Throughput beside perfect scaling, efficiency, and cost where it is known, over the number of devices.

    Returns:
        A PNG file.
    """
    from matplotlib.figure import Figure

    panels = [_draw_throughput, _draw_efficiency, *([_draw_cost] if scaling.currency else [])]
    figure = Figure(figsize=(4.5 * len(panels), 4), layout="constrained")
    figure.suptitle(title)
    for position, draw in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), position)
        draw(axes, scaling)
        axes.set_xlabel("devices")
        axes.set_ylim(bottom=0)
        axes.locator_params(axis="x", integer=True)
        axes.grid(alpha=0.3)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def _draw_throughput(axes: Axes, scaling: Scaling) -> None:
    devices, rates = _points(scaling, lambda row: row.figures.samples_per_second)
    axes.plot(devices, rates, marker="o", label="measured")
    if scaling.base and scaling.base.per_device:
        axes.plot(devices, [scaling.base.per_device * each for each in devices], "k--", label="perfect scaling")
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
