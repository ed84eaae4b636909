"""A page, and its HTML: one file without scripts that needs nothing from the network, with figures the way people
read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from azureml_strategy.cluster.job import format_money
from azureml_strategy.reporting.advice import NextStep
from azureml_strategy.reporting.charts import Chart

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup
_LAST_MS = 253402300800000  # the end of the year 9999, beyond which Python has no dates
_DAY_S, _HOUR_S, _MINUTE_S = 86400, 3600, 60

# Characters that HTML does not have; a user's text may hold any.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def duration(seconds: float) -> str:
    """A time span with its two largest units: `2 h 5 min`."""
    whole = round(seconds)
    if whole < _MINUTE_S:
        return f"{whole} s" if seconds >= 10 or whole == seconds else f"{seconds:.1f} s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min {whole % _MINUTE_S} s"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
    return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"


def moment(at_ms: float) -> str:
    """A time in ms since 1970, in UTC: `2026-11-23 14:05 UTC`."""
    if not 0 <= at_ms < _LAST_MS:
        return "an unknown time"
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")


def figure(value: float) -> str:
    """A number with four significant digits: `1,234`, `0.01234`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def money(amount: float, currency: str) -> str:
    """An amount with its currency."""
    return f"{format_money(amount)} {currency}"


class Tile(NamedTuple):
    """A figure that stands out."""

    name: str
    value: str
    more: str = ""


class LegendEntry(NamedTuple):
    """A colour of the section's first chart, its name and its value."""

    colour: str
    name: str
    value: str


class Text(NamedTuple):
    """A long text under a title."""

    title: str
    text: str


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        rows: texts.
        heads: of the columns; empty for a table of names and values.
        title: above it.
        numbers: columns of numbers, by index.
        folded: whether only the title is shown until the reader opens it.
    """

    rows: Sequence[Sequence[str]]
    heads: Sequence[str] = ()
    title: str = ""
    numbers: Sequence[int] = ()
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """A part of a page; one without content is left out.

    Attributes:
        title: heading.
        text: a sentence or two below it, with `code` in backquotes.
        charts: charts.
        tables: below the charts.
        legend: of the first chart, in groups by name.
        folded: texts of which only the titles are shown until the reader opens them.
    """

    title: str
    text: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    legend: Mapping[str, Sequence[LegendEntry]] = field(default_factory=dict)
    folded: Sequence[Text] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page. All texts are escaped when it is rendered.

    Attributes:
        title: heading.
        kicker: what kind of page it is.
        headline: the verdict, as a sentence.
        verdict: what explains the verdict, by name.
        verdict_tone: `good`, `neutral` or empty for a warning.
        status: a word beside the title.
        tone: `good`, `bad` or empty.
        facts: below the title.
        stopped: where a run stopped.
        tiles: figures that stand out.
        steps: what to do next.
        sections: the rest.
        notes: at the end: what was left out.
    """

    title: str
    kicker: str
    headline: str
    verdict: Mapping[str, str] = field(default_factory=dict)
    verdict_tone: str = ""
    status: str = ""
    tone: str = ""
    facts: Sequence[str] = ()
    stopped: Text | None = None
    tiles: Sequence[Tile] = ()
    steps: Sequence[NextStep] = ()
    sections: Sequence[Section] = ()
    notes: Sequence[str] = ()


def render(page: Page) -> str:
    """The page as HTML. Secrets are taken out where its texts are read."""
    shown = [each for each in page.sections if each.charts or any(table.rows for table in each.tables) or each.folded]
    shown = [replace(each, tables=[table for table in each.tables if table.rows]) for each in shown]
    text = _template().render(page={**vars(page), "sections": shown}, version=version("azureml-strategy"))
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["code"] = _with_code
    return environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))


def _with_code(text: str) -> Markup:
    """Escape a text, and set what is in backquotes as code."""
    from markupsafe import Markup, escape

    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 and number < len(parts) - 1 else part
        for number, part in enumerate(parts)
    )
