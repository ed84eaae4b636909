"""Draws charts with matplotlib as SVG that stands inside a page and takes the page's colours, light or dark."""

from __future__ import annotations

import io
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any
from zlib import crc32

from azureml_strategy.reporting.series import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of the page, by their names in page.html. matplotlib draws with stand-ins, which `_svg` replaces by the names.
_NAMES = (
    *("ink", "muted", "grid", "alarm", "line1", "line2", "line3", "line4", "line5", "line6", "line7", "line8"),
    *("part-compute", "part-compute2", "part-optimizer", "part-data", "part-copy", "part-network", "part-bubble"),
    *("part-other", "part-save", "part-check", "part-start"),
)
_INKS = {name: f"#{place:02x}fe{place:02x}" for place, name in enumerate(_NAMES)}
LINES = tuple(f"line{number}" for number in range(1, 9))
"""Colours of lines, in order; Okabe and Ito's, which colour-blind readers tell apart."""
WIDTH, HEIGHT = 7.4, 2.9
"""Inches of a chart, of 72 units each; text has 11 units, so that it can still be read on a telephone."""
_LONGEST_LABEL = 22
_LARGEST = 1e300  # of a value in a chart
_TIME_UNITS = ((86400e3, "days"), (3600e3, "hours"), (60e3, "minutes"), (1e3, "seconds"))
# Where the whole range is so many times the range of most points, a linear axis would show a spike and a flat line.
_SPIKY = 8
_CHARACTER = 6.6  # units of an average character, at the size of the text
# Where two points are so many times as far apart as usual, nothing ran between them.
_GAP = 10


@dataclass(frozen=True)
class Chart:
    """A chart of a page, as an `svg` element."""

    title: str
    svg: str
    text: str = ""  # a sentence below it
    wide: bool = False  # it takes the whole width of the page


@dataclass(frozen=True)
class Line:
    """A line of a chart, in one of the colours of `LINES`, with a label at its end."""

    label: str
    series: Series
    colour: str = "line1"


@dataclass(frozen=True)
class Marks:
    """What happened, at times in ms since 1970 and, where it is known, at steps.

    Attributes:
        restarts: starts of attempts after the first.
        checkpoints: windows in which checkpoints were taken.
        alarms: crashes, hangs and stops.
    """

    restarts: Sequence[tuple[float, float]] = ()
    checkpoints: Sequence[tuple[float, float]] = ()
    alarms: Sequence[tuple[float, float]] = ()


def ink(name: str) -> str:
    """The colour that matplotlib draws with for a colour of the page."""
    return _INKS[name]


_STYLE: Any = {
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "azureml-strategy",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": ink("muted"),
    "axes.labelcolor": ink("muted"),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": ink("grid"),
    "grid.linewidth": 0.8,
    "text.color": ink("ink"),
    "xtick.color": ink("muted"),
    "ytick.color": ink("muted"),
    "ytick.left": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "path.simplify": False,  # the series are small already, and keep their extremes
}


def plain(text: str, length: int = 60) -> str:
    """Text of a user's for a chart: on one line, without control characters, not too long."""
    kept = "".join(each if unicodedata.category(each)[0] != "C" else " " for each in text)
    return kept if len(kept) <= length else f"{kept[: length - 3]}..."


@contextmanager
def drawing(
    width: float = WIDTH, height: float = HEIGHT, left: Sequence[str] = ("000,000",), right: Sequence[str] = ()
) -> Iterator[tuple[Figure, Callable[[str], str]]]:
    """Yield a figure in the page's style, and a function that returns it as an `svg` element with a given title.

    Width and height are in inches of 72 units. The margins are computed here from the lengths of the longest texts to
    the left and to the right of the axes. Matplotlib's own layout would draw each figure twice more to measure them.
    """
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with (
        rc_context({**_STYLE, "axes.prop_cycle": cycler(color=[ink(name) for name in LINES])}),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of letters that the font for measuring text does not have
        figure = Figure(figsize=(width, height))
        units_wide, units_high = 72 * width, 72 * height
        figure.subplots_adjust(
            left=(_CHARACTER * max(map(len, left), default=0) + 10) / units_wide,
            right=1 - (_CHARACTER * max(map(len, right), default=0) + 14) / units_wide,
            bottom=min(42 / units_high, 0.45),
            top=max(1 - 22 / units_high, 0.55),
        )
        yield figure, lambda title: _svg(figure, title)


def _svg(figure: Figure, title: str) -> str:
    content = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(content, format="svg", transparent=True, metadata=nothing)
    drawn = content.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    (viewed,) = re.findall(r'viewBox="[^"]*"', drawn)[:1]
    drawn = re.sub(r"<svg[^>]*>", f'<svg {viewed} role="img" aria-label="{escape(plain(title))}">', drawn, count=1)
    # Several charts share one page, so their names must differ.
    own = f"c{crc32((title + drawn).encode()):x}-"
    drawn = re.sub(r'\bid="', f'id="{own}', drawn)
    drawn = drawn.replace("url(#", f"url(#{own}").replace('href="#', f'href="#{own}').replace("xlink:href", "href")
    # Paths to a tenth of a unit, which is less than a pixel.
    drawn = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), drawn)
    drawn = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--sans)", drawn)
    drawn = drawn.replace("#000000", "var(--ink)")  # what the pictures of study and bench draw in black
    for name, colour in _INKS.items():
        drawn = drawn.replace(colour, f"var(--{name})")
    unseen = r"<!--.*?-->|<metadata>.*?</metadata>|\n\s*"
    return re.sub(unseen, lambda found: " " if found[0].startswith("\n") else "", drawn, flags=re.S)


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    unit: str = "",
    over: str = "step",
    start_ms: float = 0.0,
    marks: Marks | None = None,
    percent: bool = False,
    from_zero: bool = False,
    text: str = "",
    wide: bool = False,
) -> Chart:
    """Draw metrics over steps or over time.

    Args:
        title: of the chart.
        lines: at least one, each with a finite point.
        unit: of the values.
        over: `step` or `time`.
        start_ms: where the time begins.
        marks: what happened meanwhile.
        percent: show values from 0 to 1 as percent.
        from_zero: begin the axis of the values at zero.
        text: see `Chart`.
        wide: see `Chart`.
    """
    lines = [replace(line, series=_clipped(line.series)) for line in lines]
    from matplotlib.ticker import MaxNLocator

    places = {id(line): line.series.times_ms - start_ms if over == "time" else line.series.steps for line in lines}
    scale, x_unit = _axis_unit(over, max(float(each[-1]) for each in places.values()))
    labels = [plain(line.label, _LONGEST_LABEL) for line in lines] if len(lines) > 1 else []
    with drawing(WIDTH * (1.9 if wide else 1), right=labels) as (figure, finish):
        axes = figure.add_subplot()
        for line in lines:
            _draw_line(axes, places[id(line)] / scale, line, gaps=over == "time")
        _scale_value_axis(axes, [line.series for line in lines], percent, from_zero)
        only = {float(place) for each in places.values() for place in each}
        if len(only) == 1:  # matplotlib would count hundredths of a step around it
            axes.set_xticks([only.pop() / scale])
        elif over == "step":
            axes.xaxis.set_major_locator(MaxNLocator("auto", steps=(1, 2, 2.5, 5, 10), integer=True))
        axes.set_xlabel(x_unit)
        axes.set_title(unit, loc="left", color=ink("muted"), fontsize=11)
        if len(lines) > 1:
            _label_ends(axes, lines)
        if marks is not None:
            draw_marks(axes, marks, lambda at: (at[0] - start_ms if over == "time" else at[1]) / scale)
        return Chart(title, finish(title), text, wide)


def _clipped(series: Series) -> Series:
    """The series with values small enough for matplotlib, which computes the range of an axis from them."""
    import numpy as np

    clipped = {name: np.clip(getattr(series, name), -_LARGEST, _LARGEST) for name in ("means", "lows", "highs")}
    return replace(series, **clipped)


def _axis_unit(over: str, largest: float) -> tuple[float, str]:
    """The factor by which places on the horizontal axis are divided, and the unit that the axis then has."""
    if over == "step":
        return 1.0, "step"
    length, unit = next((each for each in _TIME_UNITS if largest >= 2 * each[0]), _TIME_UNITS[-1])
    return length, f"{unit} since the start"


def drawn_chart(title: str, draw: Callable[[Axes], None], x_unit: str, wide: bool = False) -> Chart:
    """A chart of what a function draws with matplotlib's own colours, such as the pictures of a study.

    `x_unit` is the label of the horizontal axis.
    """
    with drawing(WIDTH * (1.9 if wide else 1), HEIGHT * (1.3 if wide else 1), left=("000,000,00",)) as (figure, finish):
        axes = figure.add_subplot()
        draw(axes)
        axes.set_xlabel(x_unit)
        return Chart(title, finish(title), wide=wide)


def _draw_line(axes: Axes, places: Any, line: Line, gaps: bool) -> None:
    import numpy as np

    colour, series = ink(line.colour), line.series
    apart = np.diff(places)
    cut = np.flatnonzero(apart > _GAP * np.median(apart)) + 1 if gaps and len(apart) else np.empty(0, int)
    places, means, lows, highs = (
        np.insert(each, cut, np.nan) for each in (places, series.means, series.lows, series.highs)
    )
    if not series.exact:
        axes.fill_between(places, lows, highs, color=colour, alpha=0.22, linewidth=0)
    alone = len(places) == 1
    axes.plot(places, means, color=colour, marker="o" if len(places) <= 12 else None, ms=6 if alone else 3.5)


def _scale_value_axis(axes: Axes, all_series: Sequence[Series], percent: bool, from_zero: bool) -> None:
    import numpy as np
    from matplotlib.ticker import FuncFormatter, NullFormatter

    low = min(float(each.lows.min()) for each in all_series)
    high = max(float(each.highs.max()) for each in all_series)
    form = FuncFormatter(lambda value, _: f"{100 * value:.3g}%" if percent else _axis_number(value))
    usual = np.quantile(np.concatenate([each.means for each in all_series]), (0.1, 0.9))
    if from_zero and low >= 0:
        axes.set_ylim(0, 1.12 * high if high > 0 else 1)
    elif low > 0 and high > _SPIKY * low and high - low > _SPIKY * (usual[1] - usual[0]):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(form)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _axis_number(value)))


def _axis_number(value: float) -> str:
    if abs(value) >= 1e15:
        return f"{value:.3g}"
    for length, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= length:
            return f"{value / (1e3 if letter == 'k' else length):.4g}{letter}"
    return f"{value:,.5g}"


def _label_ends(axes: Axes, lines: Sequence[Line]) -> None:
    """Write each label at the end of its line, spread so that none covers another."""
    to_axes = axes.transScale + axes.transLimits
    ends = [float(to_axes.transform((0 + axes.get_xlim()[0], line.series.means[-1]))[1]) for line in lines]
    order = sorted(range(len(lines)), key=lambda index: ends[index])
    height, place = 0.09, -1.0
    for index in order:
        place = max(place + height, min(ends[index], 1 - height * (len(lines) - 1 - order.index(index))))
        line = lines[index]
        axes.annotate(
            plain(line.label, _LONGEST_LABEL),
            (1, place),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=ink(line.colour),
            annotation_clip=False,
        )


def draw_marks(axes: Axes, marks: Marks, place: Callable[[tuple[float, float]], float]) -> None:
    """Draw what happened, as lines with a word at their top; checkpoints as triangles on the axis.

    `place` computes the place on the axis from the time and the step of something that happened.
    """
    style: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "bottom"}
    for at in marks.restarts:
        axes.axvline(place(at), color=ink("muted"), linestyle=(0, (4, 3)), linewidth=1.2)
        axes.annotate("restart", (place(at), 1), xytext=(0, 2), ha="center", color=ink("muted"), **style)
    for at in marks.alarms:
        axes.axvline(place(at), color=ink("alarm"), linewidth=1.6)
        axes.annotate("stopped", (place(at), 1), xytext=(0, 2), ha="right", color=ink("alarm"), **style)
    saved = [place(at) for at in marks.checkpoints]
    if saved:
        across = axes.get_xaxis_transform()
        axes.plot(saved, [0.0] * len(saved), "^", ms=6, color=ink("ink"), transform=across, clip_on=False, zorder=3)
