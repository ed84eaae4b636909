"""The page of a study: how speed and cost change with the size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from azureml_strategy.cluster.job import count, format_money
from azureml_strategy.reporting.advice import NextStep
from azureml_strategy.reporting.charts import drawn_chart
from azureml_strategy.reporting.page import Page, Section, Table, Tile, figure
from azureml_strategy.reporting.stores import ReportError
from azureml_strategy.study.options import StudyError
from azureml_strategy.study.report import panels, study_columns
from azureml_strategy.study.scaling import Row, Scaling, read_scaling

# Below it, the larger size wastes more than it saves in time.
_GOOD_EFFICIENCY = 0.8


def study_page(content: Mapping[str, Any]) -> Page:
    """Make the page of a study from the content of the JSON file that `study` wrote.

    Raises:
        ReportError: it is no such file.
    """
    try:
        scaling = read_scaling(content)
    except StudyError as error:
        raise ReportError(str(error)) from None
    measured = [row for row in scaling.rows if row.efficiency is not None]
    largest = max(measured, key=lambda row: row.figures.devices or 0, default=None)
    columns = study_columns(scaling)
    rows = [[column.value(row) or "-" for column in columns] for row in scaling.rows]
    table = Table(rows, [column.heading for column in columns], numbers=range(len(columns)))
    good = largest is not None and (largest.efficiency or 0) >= _GOOD_EFFICIENCY
    emulated = ", emulated" if scaling.emulated else ""
    charts = [drawn_chart(title, draw, "devices") for title, draw in panels(scaling).items()] if scaling.base else []
    return Page(
        title="Scaling study",
        kicker="Report on an emulated study" if scaling.emulated else "Report on a study",
        headline=_headline(scaling, largest),
        verdict=_explained(scaling, largest),
        verdict_tone="good" if good else "" if largest else "neutral",
        facts=[
            count(len(scaling.rows), "run"),
            f"counted in {scaling.unit}",
            *(["emulated on one machine"] if scaling.emulated else []),
        ],
        tiles=list(_tiles(scaling, largest)),
        steps=list(_steps(scaling, largest)),
        sections=[
            Section(f"Against ideal scaling{emulated}", charts=charts),
            Section(f"Each size{emulated}", tables=[table]),
        ],
        notes=list(_notes(scaling)),
    )


def _notes(scaling: Scaling) -> Iterator[str]:
    if scaling.emulated:
        yield (
            "Emulated: all nodes shared one machine. The figures show what the processes cost one another there, not "
            "what a cluster will do."
        )
    yield from scaling.failures
    if scaling.measured:
        yield f"{scaling.measured}: charts, speed-up and efficiency are without the others."
    if scaling.differences:
        yield f"The runs differ in more than size: {', '.join(scaling.differences)}."


def _cheapest(scaling: Scaling) -> Row | None:
    priced = [row for row in scaling.rows if row.figures.cost_per_million_samples is not None]
    return min(priced, key=lambda row: row.figures.cost_per_million_samples or 0, default=None)


def _headline(scaling: Scaling, largest: Row | None) -> str:
    if scaling.base is None or largest is None:
        return "No run of this study measured a throughput."
    emulated = "Emulated: " if scaling.emulated else ""
    if largest.figures is scaling.base:
        rate = figure(scaling.base.samples_per_second or 0)
        return f"{emulated}One size was measured: {rate} {scaling.unit} per second."
    return (
        f"{emulated}{count(largest.figures.devices or 0, 'device')} are {largest.speed_up:.2g} times as fast as "
        f"{scaling.base.devices}: {largest.efficiency:.0%} of ideal scaling."
    )


def _explained(scaling: Scaling, largest: Row | None) -> dict[str, str]:
    cheapest, currency = _cheapest(scaling), scaling.currency
    if cheapest is None or largest is None:
        return {}
    costs = cheapest.figures.cost_per_million_samples or 0
    text = (
        f"{count(cheapest.figures.devices or 0, 'device')}: {format_money(costs)} {currency} a million {scaling.unit}."
    )
    return {f"The cheapest size{', emulated' if scaling.emulated else ''}": text}


def _tiles(scaling: Scaling, largest: Row | None) -> Iterator[Tile]:
    emulated = "emulated, " if scaling.emulated else ""
    if largest is not None:
        rate = figure(largest.figures.samples_per_second or 0)
        yield Tile(f"{scaling.unit} per second", rate, f"{emulated}on {count(largest.figures.devices or 0, 'device')}")
        yield Tile("efficiency", f"{largest.efficiency:.0%}", f"{emulated}of the largest size that was measured")
    cheapest = _cheapest(scaling)
    if cheapest is not None:
        cost = format_money(cheapest.figures.cost_per_million_samples or 0)
        yield Tile(f"a million {scaling.unit}", f"{cost} {scaling.currency}", f"{emulated}at the cheapest size")


def _steps(scaling: Scaling, largest: Row | None) -> Iterator[NextStep]:
    failed = [row.figures for row in scaling.rows if row.figures.problem]
    if failed and failed[0].run_id:
        error = f": {failed[0].error.rstrip('.')}" if failed[0].error else ""
        problem = f"{failed[0].name or failed[0].run_id}: {failed[0].problem}{error}."
        yield NextStep("Look at the run that failed", f"{problem} `azureml-strategy report {failed[0].run_id}`")
    if largest is not None and largest.figures is not scaling.base:
        run = largest.figures.run_id
        yield NextStep("See what the largest size waits for", f"`azureml-strategy report {run}` says it.")
    if scaling.currency is None:
        yield NextStep("Tell the study a price", "`azureml-strategy study --runs ID,ID --price-per-hour X` adds costs.")
