"""The page of several runs beside one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from azureml_strategy.cluster.job import count
from azureml_strategy.reporting.advice import NextStep, verdict_of
from azureml_strategy.reporting.charts import LINES, Chart, Line, line_chart, plain
from azureml_strategy.reporting.collect import RunRecord
from azureml_strategy.reporting.page import LegendEntry, Page, Section, Table, duration, figure, money
from azureml_strategy.reporting.part_charts import PART_COLOURS, bars
from azureml_strategy.tracking.verdict import NAMES, mfu_text

_MOST_CHARTS, _MOST_OWN = 16, 8
_MOST_RUNS = len(LINES)
_LONGEST = 22  # characters of a line's label
_RATE = "samples_per_second"


def compare_page(records: Sequence[RunRecord]) -> Page:
    """Make the page that compares two or more runs. Charts show the first eight."""
    names = _names(records)
    named = list(zip(names, records, strict=True))
    drawn = dict(list(zip(_labels(names), records, strict=True))[:_MOST_RUNS])
    params = sorted({name for record in records for name in record.run.params})
    settings = [[name, *(record.run.params.get(name, "") for record in records)] for name in params]
    differing = [row for row in settings if len(set(row[1:])) > 1]
    return Page(
        title=" and ".join(names) if len(names) == 2 else count(len(names), "run"),
        kicker="Comparison of runs",
        headline=_headline(named),
        verdict_tone="neutral",
        facts=[f"{name}: run {record.run.run_id}" for name, record in named],
        steps=[NextStep(name, verdict_of(record).line) for name, record in named[:_MOST_RUNS]],
        sections=[
            Section("Figures", tables=[Table(_figures(records), ("", *names), numbers=range(1, len(names) + 1))]),
            _steps_section(drawn),
            Section("Over the steps", charts=_charts(drawn)),
            Section("Settings in which they differ", tables=[Table(differing, ("setting", *names))]),
        ],
        notes=[
            *(f"{name}: {note}" for name, record in named for note in record.notes),
            *_left_out(records, names, drawn),
        ],
    )


def _left_out(records: Sequence[RunRecord], names: Sequence[str], drawn: dict[str, RunRecord]) -> Iterator[str]:
    """The notes about runs and metrics that are not on the page."""
    if len(names) > len(drawn):
        yield f"Charts show {len(drawn)} of {len(names)} runs, and not {', '.join(names[len(drawn) :])}."
    for what, all_of, most in (("charts", _shared(drawn), _MOST_CHARTS), ("figures", _own(records), _MOST_OWN)):
        if len(all_of) > most:
            yield f"{most} of {len(all_of)} metrics have {what}, and not {', '.join(all_of[most:][:5])}."


def _names(records: Sequence[RunRecord]) -> list[str]:
    """The names of the runs, with a part of the id where a name stands twice."""
    names = [plain(record.run.name, 40) for record in records]
    return [
        f"{name} {record.run.run_id[:6]}" if names.count(name) > 1 else name
        for name, record in zip(names, records, strict=True)
    ]


def _labels(names: Sequence[str]) -> list[str]:
    """A label for each run, short enough for a chart: names of runs often differ at their ends, or not at all."""
    short = [name if len(name) <= _LONGEST else f"{name[:9]}...{name[12 - _LONGEST :]}" for name in names]
    return [
        f"{place + 1}: {label[: _LONGEST - 4]}" if short.count(label) > 1 else label
        for place, label in enumerate(short)
    ]


def _headline(named: Sequence[tuple[str, RunRecord]]) -> str:
    rates = {name: rate for name, record in named if (rate := record.measured(_RATE)) is not None}
    if len(rates) < 2:
        return "Fewer than two of these runs measured their throughput."
    fastest, slowest = max(rates, key=lambda name: rates[name]), min(rates, key=lambda name: rates[name])
    if not rates[slowest] or rates[fastest] == rates[slowest]:
        return "These runs are equally fast."
    return (
        f"{fastest} is the fastest: {rates[fastest] / rates[slowest] - 1:.0%} more samples per second than {slowest}."
    )


def _figures(records: Sequence[RunRecord]) -> list[list[str]]:
    percent = "{:.1%}".format
    rows: list[tuple[str, Callable[[RunRecord], str]]] = [
        ("status", lambda record: record.run.status.lower()),
        ("samples per second", lambda record: _text(record.measured(_RATE))),
        ("planned samples per second", lambda record: _text(_planned(record))),
        ("per device", lambda record: _text(record.measured(f"{_RATE}_per_device"))),
        (
            "step, median ms",
            lambda record: _text(record.metric("summary/step_time_median_s"), lambda s: figure(1000 * s)),
        ),
        ("MFU", lambda record: _text(record.measured("mfu"), mfu_text)),
        ("waiting for data", lambda record: _text(record.shares.get("data_wait"), percent)),
        ("exposed communication", lambda record: _text(record.shares.get("communication"), percent)),
        ("goodput", lambda record: _text(record.metric("time/goodput"), percent)),
        ("devices", lambda record: _text(record.metric("summary/devices"))),
        ("took", _took),
        ("cost", lambda record: _cost(record, "cost/run")),
        ("cost per million samples", lambda record: _cost(record, "cost/per_million_samples")),
    ]
    filled = [[title, *(value(record) for record in records)] for title, value in rows]
    filled += [
        [name, *(_text(record.run.metrics.get(name)) for record in records)] for name in _own(records)[:_MOST_OWN]
    ]
    return [row for row in filled if any(row[1:])]


def _planned(record: RunRecord) -> float | None:
    check = record.rate_check
    return check.expected.samples_per_second if check else None


def _own(records: Sequence[RunRecord]) -> list[str]:
    """The names of all validation metrics."""
    return sorted({name for record in records for name in record.series if name.startswith("val")})


def _took(record: RunRecord) -> str:
    started, ended = record.run.started_ms, record.ended_ms
    return "" if started is None or ended is None else duration((ended - started) / 1000)


def _text(value: float | None, write: Callable[[float], str] = figure) -> str:
    return "" if value is None else write(value)


def _cost(record: RunRecord, name: str) -> str:
    cost = record.metric(name)
    return "" if cost is None else money(cost, record.currency)


def _steps_section(records: dict[str, RunRecord]) -> Section:
    rows = {name: record.shares for name, record in records.items() if sum(record.shares.values()) > 0}
    used = {part for shares in rows.values() for part in shares}
    legend = {"A step": [LegendEntry(PART_COLOURS[part], NAMES[part], "") for part in NAMES if part in used]}
    return Section("Where a step's time goes", charts=[bars("A step", rows)] if rows else [], legend=legend)


def _shared(records: dict[str, RunRecord]) -> list[str]:
    """The metrics that several of the runs have, the most important ones first."""
    shared = [
        name
        for name in dict.fromkeys(name for record in records.values() for name in record.series)
        if not name.startswith(("system/", "time/", "ranks/", "step/"))
        and sum(bool(record.series[name].points) for record in records.values() if name in record.series) > 1
    ]
    return sorted(shared, key=lambda name: (name.startswith("throughput/"), "loss" not in name, name))


def _charts(records: dict[str, RunRecord]) -> list[Chart]:
    charts = []
    for name in _shared(records)[:_MOST_CHARTS]:
        lines = [
            Line(label, record.series[name], LINES[place])
            for place, (label, record) in enumerate(records.items())
            if name in record.series and record.series[name].points
        ]
        percent, from_zero = name.endswith(("_share", "/mfu")), name.startswith("throughput/")
        charts.append(line_chart(name, lines, percent=percent, from_zero=from_zero))
    return charts
