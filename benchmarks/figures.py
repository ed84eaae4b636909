"""Write the tables of measured figures into benchmarks/README.md and docs/gpu.md, from results/*.json.

The text of each table is in a template. The docs site shows the first one too. A test compares the pages with what
this writes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jinja2

HERE = Path(__file__).parent
BEGIN, END = "<!-- figures: python benchmarks/figures.py -->\n", "<!-- end of figures -->\n"
PAGES = {HERE / "README.md": "figures.md.jinja", HERE.parent / "docs" / "gpu.md": "figures_gpu.md.jinja"}


def table(template: str = "figures.md.jinja") -> str:
    """The table with its figures filled in.

    Args:
        template: name of the file beside this one that has its text.

    Raises:
        KeyError: the template asks for a figure that the results do not have.
    """
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.globals.update(
        one=one,
        whole=whole,
        spread=spread,
        each=each,
        lowest=lowest,
        percent=percent,
        seconds=seconds,
        milliseconds=milliseconds,
        microseconds=microseconds,
        missed_above=lambda limit, path: "" if number(path) <= limit else ": **missed**",
        missed_below=lambda limit, path: "" if number(path) >= limit else ": **missed**",
    )
    return environment.from_string((HERE / template).read_text()).render()


def figure(path: str) -> Any:
    """A figure by the name of its results and the keys that lead to it, such as `ddp_step/loopback/step_s/torch`."""
    name, *keys = path.split("/")
    found = json.loads((HERE / "results" / f"{name}.json").read_text())["figures"]
    for key in keys:
        found = found[key]
    return found


def number(path: str) -> float:
    """The figure itself, or its median over the rounds."""
    found = figure(path)
    return float(found["median"] if isinstance(found, dict) else found)


def one(path: str, digits: int = 2) -> str:
    """The figure alone."""
    return _text(number(path), digits)


def whole(path: str) -> str:
    """The figure without digits after the point, its thousands apart."""
    return f"{math.floor(number(path) + 0.5):,}"


def spread(path: str, digits: int = 2) -> str:
    """The median with its quartiles."""
    found = figure(path)
    return f"{_text(found['median'], digits)} ({_text(found['low'], digits)} to {_text(found['high'], digits)})"


def each(path: str, digits: int = 2) -> str:
    """All figures below the path, in their order."""
    return ", ".join(one(f"{path}/{key}", digits) for key in figure(path))


def lowest(path: str, start: str) -> str:
    """The least of the figures below the path whose names begin so."""
    return _text(min(number(f"{path}/{key}") for key in figure(path) if key.startswith(start)), 0)


def percent(path: str, digits: int = 0) -> str:
    """A share as per cent."""
    return f"{_text(100 * number(path), digits)} %"


def seconds(path: str, digits: int = 2) -> str:
    """A time in seconds."""
    return f"{_text(number(path), digits)} s"


def milliseconds(path: str, digits: int = 0) -> str:
    """A time in seconds, as milliseconds."""
    return f"{_text(1e3 * number(path), digits)} ms"


def microseconds(path: str) -> str:
    """A time in seconds, as microseconds."""
    return f"{_text(1e6 * number(path), 0)} us"


def _text(value: float, digits: int) -> str:
    """Rounded half up, as a reader does."""
    scaled = math.floor(abs(value) * 10**digits + 0.5) / 10**digits
    return f"{math.copysign(scaled, value):.{digits}f}"


def filled(page: Path) -> str:
    """The text of one of the pages with its table between the two marks."""
    before, rest = page.read_text().split(BEGIN)
    return before + BEGIN + table(PAGES[page]) + END + rest.split(END)[1]


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page))
