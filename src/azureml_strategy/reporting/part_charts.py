"""Draws where the time goes: the parts of a step and of a run, and the ranks beside one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from azureml_strategy.reporting.charts import HEIGHT, WIDTH, Chart, Marks, draw_marks, drawing, ink, plain
from azureml_strategy.reporting.series import Series
from azureml_strategy.tracking.verdict import NAMES, PHASES

PART_COLOURS: Mapping[str, str] = {
    "data_wait": "part-data",
    "copy": "part-copy",
    "forward": "part-compute",
    "forward_wait": "part-save",
    "backward": "part-compute2",
    "host": "part-start",
    "communication": "part-network",
    "bubble": "part-bubble",
    "optimizer": "part-optimizer",
    "other": "part-other",
    "startup": "part-start",
    "training": "part-compute",
    "validation": "part-check",
    "checkpoint": "part-save",
    "redone": "part-network",
}
"""Colour of each part of a step and of a run: blue computes, warm colours wait."""
_NARROWEST_LABEL = 0.055  # of a bar or of an axis


def bars(title: str, rows: Mapping[str, Mapping[str, float]]) -> Chart:
    """Draw each row, by its name, as one bar of its parts, each as wide as its share.

    The parts are in any unit, by the names in `verdict.NAMES` or `verdict.PHASES`.
    """
    with drawing(WIDTH * 1.9, 0.1 + 0.6 * len(rows), left=list(rows)) as (figure, finish):
        axes = figure.add_subplot()
        figure.subplots_adjust(bottom=0, top=1, right=1)
        for row, parts in enumerate(rows.values()):
            left, whole = 0.0, sum(parts.values())
            for name in sorted(parts, key=_order):
                share = parts[name] / whole
                axes.barh(row, share, left=left, height=0.62, color=ink(PART_COLOURS[name]), linewidth=0)
                if share >= _NARROWEST_LABEL:
                    axes.text(left + share / 2, row, f"{share:.0%}", ha="center", va="center", color="#ffffff")
                left += share
        axes.set_yticks(range(len(rows)), list(rows), color=ink("ink"))
        axes.set_xlim(0, 1)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.xaxis.set_visible(False)
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return Chart(title, finish(title), wide=True)


def _order(name: str) -> int:
    return [*NAMES, *PHASES].index(name)


def stack(title: str, parts: Mapping[str, Series], marks: Marks) -> Chart:
    """Draw how the shares of the parts of a step, by the names in `verdict.NAMES`, change over the run."""
    import numpy as np

    names = sorted(parts, key=_order)
    steps = max(parts.values(), key=lambda series: len(series.steps)).steps
    shares = [np.interp(steps, parts[name].steps, parts[name].means) for name in names]
    with drawing(right=[_short_name(name) for name in names]) as (figure, finish):
        axes = figure.add_subplot()
        colours = [ink(PART_COLOURS[name]) for name in names]
        axes.stackplot(steps, shares, colors=colours, linewidth=0)
        tops = np.cumsum([share[-1] for share in shares])
        axes.set_ylim(0, max(1.0, float(np.sum(shares, axis=0).max())))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel("step")
        axes.margins(x=0)
        for name, top, share in zip(names, tops, shares, strict=True):
            if share[-1] >= _NARROWEST_LABEL:
                middle = (1.0, float(top - share[-1] / 2))
                axes.annotate(
                    _short_name(name),
                    middle,
                    xycoords=("axes fraction", "data"),
                    xytext=(6, 0),
                    textcoords="offset points",
                    va="center",
                    annotation_clip=False,
                )
        draw_marks(axes, replace(marks, checkpoints=()), lambda at: at[1])
        return Chart(title, finish(title))


def _short_name(part: str) -> str:
    return NAMES[part].split(",")[0]


def heat_map(title: str, values: Any, *, names: Sequence[str], steps: Sequence[int], restarts: Sequence[int]) -> Chart:
    """Draw how much longer each rank computes than the median rank, over the windows of a run.

    Args:
        title: of the chart.
        values: a row for each rank and a column for each window; 0.1 is 10 % longer. NaN is unknown.
        names: of the ranks.
        steps: of the windows.
        restarts: numbers of the windows with which another attempt begins.
    """
    import numpy as np

    widest = max(0.05, float(np.nanpercentile(np.abs(values), 99.5)) if np.isfinite(values).any() else 0.05)
    height = max(HEIGHT, min(1.3 + 0.24 * len(names), 8.0))
    names = [plain(name, 24) for name in names]
    with drawing(WIDTH * 1.9, height, left=names) as (figure, finish):
        axes = figure.add_subplot()
        image = axes.imshow(
            values, aspect="auto", cmap="PuOr_r", vmin=-widest, vmax=widest, interpolation="nearest", origin="upper"
        )
        bar = figure.colorbar(image, ax=axes, format=lambda value, _: f"{value:+.0%}", pad=0.01, aspect=18)
        bar.set_label("slower than the median rank", color=ink("muted"))
        bar.outline.set_visible(False)
        shown = range(0, len(names), max(1, -(-len(names) // 24)))
        axes.set_yticks(list(shown), [names[rank] for rank in shown])
        columns = np.unique(np.linspace(0, len(steps) - 1, min(8, len(steps))).round().astype(int))
        axes.set_xticks(columns, [f"{steps[column]:,}" for column in columns])
        axes.set_xlabel("step")
        axes.grid(visible=False)
        for column in restarts:
            axes.axvline(column - 0.5, color=ink("ink"), linestyle=(0, (4, 3)), linewidth=1.2)
        return Chart(title, finish(title), wide=True)
