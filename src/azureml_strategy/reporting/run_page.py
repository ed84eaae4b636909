"""The page of one run: its verdict and figures, what to do next, and sections on its time, metrics, ranks and cost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from azureml_strategy.cluster.job import count
from azureml_strategy.reporting.advice import describe_rank, last_stop, next_steps, verdict_of
from azureml_strategy.reporting.charts import LINES, Line, Marks, line_chart
from azureml_strategy.reporting.collect import RunRecord
from azureml_strategy.reporting.page import (
    LegendEntry,
    Page,
    Section,
    Table,
    Text,
    Tile,
    duration,
    figure,
    moment,
    money,
)
from azureml_strategy.reporting.part_charts import PART_COLOURS, bars, heat_map, stack
from azureml_strategy.reporting.profiles import FOLDER, RankProfile, Summary
from azureml_strategy.reporting.series import Series, join
from azureml_strategy.tracking.verdict import NAMES, PHASES, mfu_text

_MOST_NAMED = 40
_VIEWER = "https://ui.perfetto.dev"
_ON_CPU = {**NAMES, "data_wait": "idle, waiting for data", "forward": "computing", "copy": "copies", "other": "idle"}
# A GPU on which nothing runs has nothing to run: it waits until the host has launched a kernel.
_ON_GPU = {**_ON_CPU, "other": "idle, waiting for the host"}

# Which part of the data a metric is of: those of one chart differ in this alone.
_PART_OF_DATA = re.compile(r"^(?:train(?:ing)?|val(?:id(?:ation)?)?|eval|test)[/_.-]|[/_.-](?:step|epoch)$", re.I)
_GPU = re.compile(r"gpu_\d+_")
# What the hooks of a checkpoint callback take in a step without a checkpoint, and what the quickest one takes.
_HOOK_S, _LEAST_SAVE_S = 2e-4, 5e-3
_MOST_MARKS, _MOST_EVENTS, _MOST_VALUES = 200, 120, 400
_OURS = ("step/", "time/", "ranks/", "throughput/", "system/")
_STATUS = {
    "FINISHED": ("finished", "good"),
    "FAILED": ("failed", "bad"),
    "KILLED": ("stopped", "bad"),
    "RUNNING": ("running, or ended without a word", ""),
    "SCHEDULED": ("not started", ""),
}
_STOPPED = {"crash": "An exception ended this run", "hang": "This run hung", "stop": "This run was stopped"}


def profile_section(profiles: Sequence[RankProfile]) -> Section:
    """Make the section of the profiles; it is empty where no rank was profiled."""
    if not profiles:
        return Section("Profile")
    read = [(each.rank, each.summary) for each in profiles if each.summary is not None]
    bar_names = {f"rank {rank}": summary.parts for rank, summary in read}
    tables = [Table(list(_files(profiles)), ("rank", "steps", "trace", ""), "Traces")]
    for place, (rank, summary) in enumerate(read):
        tables += _tables(rank, summary, folded=place > 0)
    legend = {"Of the profiled steps": _kernel_legend([summary for _, summary in read])}
    busy = _busy([summary for _, summary in read])
    return Section(
        "Profile",
        f"What torch.profiler saw of some steps.{busy} The traces lie in `{FOLDER}/` among the run's files and open in "
        f"{_VIEWER}, which reads them in the browser and sends them nowhere.",
        [bars("A profiled step", bar_names)] if read else [],
        tables,
        legend,
    )


def _busy(summaries: Sequence[Summary]) -> str:
    """How much of the steps computes, and how much is idle, as a sentence; empty without a summary."""
    if not summaries:
        return ""
    computing = _range([each.parts["forward"] / each.window_s for each in summaries])
    idle = _range([each.idle for each in summaries])
    return f" The {summaries[0].device.upper()} computes in {computing} of their time, and is idle in {idle}."


def _names(summary: Summary) -> Mapping[str, str]:
    return _ON_GPU if summary.device == "gpu" else _ON_CPU


def _kernel_legend(summaries: Sequence[Summary]) -> list[LegendEntry]:
    names = _names(summaries[0]) if summaries else {}
    used = [name for name in names if any(each.parts.get(name) for each in summaries)]
    shares = {name: _range([each.parts[name] / each.window_s for each in summaries]) for name in used}
    return [LegendEntry(PART_COLOURS[name], names[name], shares[name]) for name in used]


def _range(shares: Sequence[float]) -> str:
    """A share, or the smallest and the largest of several ranks."""
    low, high = f"{min(shares):.1%}", f"{max(shares):.1%}"
    return low if low == high else f"{low} to {high}"


def _files(profiles: Sequence[RankProfile]) -> Iterator[tuple[str, str, str, str]]:
    for each in profiles[:_MOST_NAMED]:
        steps = each.summary.span if each.summary else ""
        missing = "on the disk of the rank only, or nowhere" if each.summary else ""
        yield str(each.rank), steps, each.trace or missing, each.problem
    more = len(profiles) - _MOST_NAMED
    if more > 0:
        yield "", "", "", f"{more} further ranks have left files."


def _tables(rank: int, summary: Summary, folded: bool) -> Iterator[Table]:
    on, names = f"the {summary.device.upper()}", _names(summary)
    number, window = len(summary.steps), summary.window_s

    def row(name: str, seconds: float, calls: int) -> tuple[str, str, str, str]:
        per_step = figure(calls / number) if calls else ""
        return name, figure(1000 * seconds / number), f"{seconds / window:.1%}", per_step

    heads, title = ("", "ms a step", "share", "calls a step"), f"rank {rank}, steps {summary.span}, times on {on}"
    parts = [row(names[name], summary.parts[name], 0) for name in names if name in summary.parts]
    below = [each[0] for each in parts].index(names["communication"]) + 1
    parts[below:below] = [row(f"of it {each.name}", each.seconds, each.calls) for each in summary.collectives]
    yield Table([*parts, row("all", window, 0)], heads, f"Time of {title}", (1, 2, 3), folded)
    operators = [row(*each) for each in summary.operators]
    yield Table(operators, heads, f"Operators of {title}", (1, 2, 3), folded)


def run_sections(record: RunRecord) -> Iterator[Section]:
    """The sections, in order; some may be empty."""
    starts = [float(each.times_ms[0]) for each in record.series.values() if len(each.times_ms)]
    starts += [record.run.started_ms] if record.run.started_ms is not None else []
    start_ms, marks = min(starts, default=0.0), marks_of(record)
    yield _time_section(record, start_ms, marks)
    yield _throughput(record, start_ms, marks)
    yield _own_metrics(record, marks)
    yield _ranks(record)
    yield profile_section(record.profiles)
    yield _counters(record, start_ms, marks)
    yield _cost(record)
    yield _events(record)
    yield _what_ran(record)


def marks_of(record: RunRecord) -> Marks:
    """Restarts, checkpoints and stops of a run."""
    starts = [event for event in record.events if event.kind == "start"]
    alarms = [event for event in record.events if event.kind in ("crash", "hang", "stop")]
    saved: list[tuple[float, float]] = []
    series = _points(record, "time/checkpoint_s")
    if series is not None:
        hooks = _HOOK_S * np.maximum(np.diff(series.steps, prepend=0.0), 0)
        grew = np.diff(series.means, prepend=0.0) > _LEAST_SAVE_S + hooks
        saved = list(zip(series.times_ms[grew].tolist(), series.steps[grew].tolist(), strict=True))
    return Marks(
        restarts=[(event.time_ms, event.step) for event in starts[1:]][-_MOST_MARKS:],
        checkpoints=saved[-_MOST_MARKS:],
        alarms=[(event.time_ms, event.step) for event in alarms][-_MOST_MARKS:],
    )


def _points(record: RunRecord, name: str) -> Series | None:
    series = record.series.get(name)
    return series if series is not None and len(series.means) else None


def _lines(record: RunRecord, prefix: str, looks: Mapping[str, tuple[str, str]]) -> list[Line]:
    """Return a line for each metric with points. `looks` has label and colour by the name without the prefix."""
    found = [(_points(record, f"{prefix}{name}"), *look) for name, look in looks.items()]
    return [Line(label, series, colour) for series, label, colour in found if series is not None]


def _add_line(groups: dict[str, list[Line]], title: str, label: str, series: Series) -> None:
    """Add a line to the chart of this title, in the colour that follows that of the line before."""
    lines = groups.setdefault(title, [])
    lines.append(Line(label, series, LINES[len(lines) % len(LINES)]))


def _time_section(record: RunRecord, start_ms: float, marks: Marks) -> Section:
    shares = {name: share for name, share in record.shares.items() if share > 0}
    times = {name: seconds for name, seconds in record.times.items() if seconds > 0}
    rows: dict[str, Mapping[str, float]] = {}
    if len(shares) > 1:
        rows["A step"] = shares
    if times:
        rows["The run"] = times
    charts = [bars("A step, and the whole run", rows)] if rows else []
    parts = {name: series for name in NAMES if (series := _points(record, f"step/{name}_share")) is not None}
    if any(len(series.means) > 1 for series in parts.values()):
        charts.append(stack("The parts of a step, over the run", parts, marks))
    looks = {"step_time_median_s": ("median", "line1"), "step_time_p95_s": ("95%", "line2")}
    step_times = _lines(record, "throughput/", looks)
    if step_times and charts:
        charts.append(
            line_chart("Time of a step", step_times, unit="seconds", over="time", start_ms=start_ms, from_zero=True)
        )
    whole = sum(times.values())
    step = [LegendEntry(PART_COLOURS[name], NAMES[name], f"{share:.1%}") for name, share in shares.items()]
    run = [
        LegendEntry(PART_COLOURS[name], PHASES[name], f"{duration(seconds)}, {seconds / whole:.1%}")
        for name, seconds in times.items()
    ]
    legend = {name: entries for name, entries in (("A step", step), ("The run", run)) if entries}
    return Section("Where the time goes", charts=charts, legend=legend)


def _throughput(record: RunRecord, start_ms: float, marks: Marks) -> Section:
    series = _points(record, "throughput/samples_per_second")
    unit = record.run.tags.get("throughput.unit", "samples")
    if series is None:
        return Section("Throughput")
    chart = line_chart(
        f"{unit} per second",
        [Line(unit, series)],
        over="time",
        start_ms=start_ms,
        marks=marks,
        from_zero=True,
        text="Triangles: checkpoints." if marks.checkpoints else "",
        wide=True,
    )
    return Section("Throughput", charts=[chart])


def _own_metrics(record: RunRecord, marks: Marks) -> Section:
    groups: dict[str, list[Line]] = {}
    for name, series in record.series.items():
        if not name.startswith(_OURS) and len(series.means):
            _add_line(groups, _PART_OF_DATA.sub("", name), name, series)
    charts, marks = [], replace(marks, checkpoints=())
    for title, lines in groups.items():
        missing = [
            f"{line.label}: {line.series.missing:,} values are NaN or infinite, the first at step "
            f"{line.series.first_missing}."
            for line in lines
            if line.series.missing
        ]
        charts.append(
            line_chart(title if len(lines) > 1 else lines[0].label, lines, marks=marks, text=" ".join(missing))
        )
    return Section("Loss and metrics", charts=charts)


def _ranks(record: RunRecord) -> Section:
    title = "Ranks beside one another"
    windows = [window for window in record.windows if window["compute_s"]]
    if windows:
        width = max(len(window["compute_s"]) for window in windows)
        values = np.array([_behind_median(window["compute_s"], width) for window in windows]).T
        names = [_rank_name(record, rank) for rank in range(width)]
        ends = np.cumsum([len(each.windows) for each in record.ranks])[:-1]
        chart = heat_map(
            "Computing time of each rank",
            values,
            names=names,
            steps=[round(window["step"]) for window in windows],
            restarts=[int(end) for end in ends if end < len(windows)],
        )
        text = "Time that a rank computes before it waits for others, against the median rank of the same window."
        return Section(
            title, text, [chart], [Table(list(_slow_ranks(record)), ("rank", "slow in", "at"), "Slow ranks")]
        )
    looks = {"max": ("max", "line2"), "median": ("median", "line1"), "min": ("min", "line3")}
    lines = _lines(record, "ranks/compute_s_", looks)
    return Section(title, charts=[line_chart("Computing time over ranks", lines, unit="seconds")] if lines else [])


def _behind_median(seconds: list[float], width: int) -> list[float]:
    median = float(np.median(seconds)) or float("nan")
    return [*(each / median - 1 for each in seconds), *[float("nan")] * (width - len(seconds))]


def _rank_name(record: RunRecord, rank: int) -> str:
    found = next((each for each in record.ranks[-1].ranks if each.get("rank") == rank), {})
    return f"{rank}  {found['host']}" if "host" in found else str(rank)


def _slow_ranks(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    windows = record.windows
    slow = [(str(rank), str(at)) for window in windows for rank, at in window["slow"].items()]
    for rank, times in Counter(rank for rank, _ in slow).most_common(8):
        at = Counter(place for each, place in slow if each == rank).most_common(1)[0][0]
        yield describe_rank(record.ranks[-1], rank), f"{times} of {len(windows)} windows", at


def _counters(record: RunRecord, start_ms: float, marks: Marks) -> Section:
    groups: dict[str, list[Line]] = {}
    for name, series in record.series.items():
        if name.startswith("system/") and len(series.means):
            *node, counter = name.split("/")[1:]
            device = _GPU.search(counter)
            label = " ".join([*node, *([device[0].strip("_").replace("_", " ")] if device else [])])
            _add_line(groups, _GPU.sub("gpu_", counter).replace("_", " "), label, series)
    zero = [title for title, lines in groups.items() if not any(line.series.highs.any() for line in lines)]
    charts, marks = [], replace(marks, checkpoints=())
    for title, lines in groups.items():
        if title in zero:
            continue
        text = ""
        if len(lines) > 4:
            text = f"Mean of {len(lines)} nodes or devices; the band reaches from the lowest to the highest."
            lines = [Line("", join([line.series for line in lines]))]
        charts.append(line_chart(title, lines, over="time", start_ms=start_ms, marks=marks, from_zero=True, text=text))
    return Section("Counters", f"Zero all the time: {', '.join(zero)}." if zero else "", charts)


def _cost(record: RunRecord) -> Section:
    cost, tags, currency = record.metric("cost/run"), record.run.tags, record.currency
    if cost is None:
        return Section("Cost")
    rows = [("The run, all attempts", money(cost, currency))]
    per_million = record.metric("cost/per_million_samples")
    if per_million is not None:
        rows.append((f"A million {tags.get('throughput.unit', 'samples')}", money(per_million, currency)))
    if "cost.price_per_hour" in tags:
        source = ", ".join(tags[name] for name in ("cost.source", "cost.date") if name in tags)
        rows.append(("Price of a node", f"{tags['cost.price_per_hour']} {currency} an hour ({source})"))
    times = record.times
    for name, seconds in times.items():
        if seconds > 0:
            rows.append((f"of it {PHASES[name]}", money(cost * seconds / sum(times.values()), currency)))
    return Section("Cost", tables=[Table(rows)])


def _events(record: RunRecord) -> Section:
    events = record.events
    text = ""
    if len(events) > _MOST_EVENTS:
        text = f"The first and last of {len(events):,} events."
        events = [*events[: _MOST_EVENTS // 2], *events[-_MOST_EVENTS // 2 :]]
    rows = [(moment(each.time_ms), f"{each.step:,}", each.kind.replace("_", " "), each.text) for each in events]
    return Section("What happened", text, tables=[Table(rows, ("when", "step", "what", ""), numbers=(1,))])


def _what_ran(record: RunRecord) -> Section:
    tables = [Table(list(_setup(record))), Table(list(_network(record)), _NETWORK_HEADS, "Network settings")]
    params = Table(sorted(record.run.params.items()), ("name", "value"), "Every recorded setting", folded=True)
    last = [(name, figure(value)) for name, value in sorted(record.run.metrics.items())]
    cut = f"The last values of {_MOST_VALUES} of {len(last):,} metrics"
    title = "Every metric's last value" if len(last) <= _MOST_VALUES else cut
    values = Table(last[:_MOST_VALUES], ("metric", "last value"), title, numbers=(1,), folded=True)
    folded = [Text("config.yaml", record.config)] if record.config else []
    return Section("What ran", tables=[table for table in (*tables, params, values) if table.rows], folded=folded)


_NETWORK_HEADS = ("node", "setting", "value", "reason")
_SETUP = (
    *(("recipe", "azureml_strategy.recipe"), ("overrides", "azureml_strategy.overrides")),
    *(("command", "azureml_strategy.command"), ("versions", "azureml_strategy.versions")),
    *(("git commit", "mlflow.source.git.commit"), ("started by", "mlflow.user"), ("source", "mlflow.source.name")),
    *(("VM size", "network.vm_size"), ("transport", "network.transport"), ("adapters", "network.hcas")),
    *(("GPUDirect RDMA", "network.gpudirect"), ("optimizer", "azureml_strategy.optimizer")),
)
_PARAMS = (
    *(("strategy", "strategy/_target_"), ("precision", "trainer/precision"), ("model", "model/_target_")),
    *(("data", "data/_target_"), ("batch of a rank", "data/batch_size"), ("loader workers", "data/num_workers")),
)


def _setup(record: RunRecord) -> Iterator[tuple[str, str]]:
    for title, name in _SETUP:
        if record.run.tags.get(name):
            yield title, record.run.tags[name]
    for title, name in _PARAMS:
        if record.run.params.get(name):
            yield title, record.run.params[name]
    yield "experiment", record.run.experiment
    yield "store", record.store
    yield "open it in MLflow", record.open_with


def _network(record: RunRecord) -> Iterator[tuple[str, str, str, str]]:
    """Each setting that some node has, with its reason; one row for nodes that have the same."""
    hosts: dict[tuple[str, str, str], list[str]] = {}
    for node in record.network.get("nodes", ()):
        for each in (*node["settings"], *node["kept"]):
            row = (str(each.get("variable", "")), str(each.get("value", "")), str(each.get("reason", "")))
            hosts.setdefault(row, []).append(str(node.get("host", "")))
    for row, found in hosts.items():
        yield found[0] if len(found) == 1 else f"{len(found)} nodes", *row


def run_page(record: RunRecord) -> Page:
    """Make the page of a run."""
    verdict, check = verdict_of(record), record.rate_check
    first = verdict.advice[0] if verdict.advice else None
    slow = check.sentence(verdict) if check else ""
    explained = {"Why": first.why, "What to try": first.action, "What it would gain": first.gain} if first else {}
    status, tone = _STATUS.get(record.run.status, (record.run.status.lower(), ""))
    return Page(
        title=record.run.name,
        kicker=f"Report on a run of {record.run.tags.get('azureml_strategy.recipe') or record.run.experiment}",
        headline=verdict.headline,
        verdict=explained | ({"What it should be": slow} if slow else {}),
        verdict_tone="" if first or slow else "good" if verdict.measured else "neutral",
        status=status,
        tone=tone,
        facts=list(_facts(record)),
        stopped=_stopped(record),
        tiles=list(_tiles(record)),
        steps=next_steps(record, verdict),
        sections=list(run_sections(record)),
        notes=record.notes,
    )


def _facts(record: RunRecord) -> Iterator[str]:
    run, nodes, devices = record.run, record.metric("summary/nodes"), record.metric("summary/devices")
    if run.started_ms is not None:
        yield f"started {moment(run.started_ms)}"
    if run.started_ms is not None and record.ended_ms is not None:
        yield f"took {duration(max(0.0, record.ended_ms - run.started_ms) / 1000)}"
    if nodes is not None and devices is not None:
        yield f"{count(nodes, 'node')}, {count(devices, 'device')}"
    if record.steps is not None:
        yield count(record.steps, "step")
    if len(record.attempts) > 1:
        yield count(len(record.attempts), "attempt")
    yield f"run {run.run_id}"


def _stopped(record: RunRecord) -> Text | None:
    stop = last_stop(record)
    if stop is not None:
        return Text(f"{_STOPPED[stop.kind]} at step {stop.step:,}, on {moment(stop.time_ms)}.", stop.text)
    if record.run.status not in ("FAILED", "KILLED"):
        return None
    step = "before its first step" if record.last_step is None else f"after step {record.last_step:,}"
    return Text(f"This run ended {step}; it left no word of the reason. The log of rank 0 may have one.", "")


def _tiles(record: RunRecord) -> Iterator[Tile]:
    unit = record.run.tags.get("throughput.unit", "samples")
    rate, each = record.measured("samples_per_second"), record.measured("samples_per_second_per_device")
    if rate is not None:
        yield Tile(f"{unit} per second", figure(rate), f"{figure(each)} per device" if each is not None else "")
    check = record.rate_check
    if check is not None:
        expected = check.expected
        more = (
            f"{figure(expected.low)} to {figure(expected.high)} on {expected.place}; {check.share:.0%} of it measured"
        )
        yield Tile(f"{unit} per second, planned", figure(expected.samples_per_second), more)
    median, p95 = record.measured("step_time_median_s"), record.measured("step_time_p95_s")
    if median is not None:
        yield Tile("step, median", f"{figure(1000 * median)} ms", f"95% below {figure(1000 * p95)} ms" if p95 else "")
    mfu = record.measured("mfu")
    if mfu is not None:
        yield Tile("MFU", mfu_text(mfu), "of the devices' peak")
    goodput = record.metric("time/goodput")
    if goodput is not None:
        yield Tile("goodput", f"{goodput:.0%}", "of the time trained")
    cost, currency = record.metric("cost/run"), record.currency
    if cost is not None:
        per_million = record.metric("cost/per_million_samples")
        more = f"{money(per_million, currency)} per million {unit}" if per_million is not None else ""
        yield Tile("cost", money(cost, currency), more)
    # The metric that a reader looks for first.
    names = sorted(record.run.metrics, key=lambda name: (not name.startswith(("val", "eval", "test")), name))
    for word in ("top1", "acc", "loss"):
        found = next((name for name in names if word in name.lower() and name in record.series), None)
        if found is not None:
            yield Tile(found, figure(record.run.metrics[found]), "last value")
            return
