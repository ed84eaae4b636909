"""The section of a run's page that shows what profiled steps spent their time on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from azureml_strategy.reporting.formats import figure
from azureml_strategy.reporting.page import LegendEntry, Section, Table
from azureml_strategy.reporting.part_charts import PART_COLOURS, bars
from azureml_strategy.reporting.profiles import FOLDER, RankProfile, Summary
from azureml_strategy.tracking.verdict import NAMES

_MOST_NAMED = 40
_VIEWER = "https://ui.perfetto.dev"
_ON_CPU = {**NAMES, "data_wait": "idle, waiting for data", "forward": "computing", "copy": "copies", "other": "idle"}
# A GPU on which nothing runs has nothing to run: it waits until the host has launched a kernel.
_ON_GPU = {**_ON_CPU, "other": "idle, waiting for the host"}


def profile_section(profiles: Sequence[RankProfile]) -> Section:
    """Make the section of the profiles; it is empty where no rank was profiled.

    Args:
        profiles: as `read_profiles` returns them.
    """
    if not profiles:
        return Section("Profile")
    read = [(each.rank, each.summary) for each in profiles if each.summary is not None]
    bar_names = {f"rank {rank}": summary.parts for rank, summary in read}
    tables = [Table(list(_files(profiles)), ("rank", "steps", "trace", ""), "Traces")]
    for place, (rank, summary) in enumerate(read):
        tables += _tables(rank, summary, folded=place > 0)
    legend = {"Of the profiled steps": _legend([summary for _, summary in read])}
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


def _legend(summaries: Sequence[Summary]) -> list[LegendEntry]:
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
