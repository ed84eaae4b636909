"""What the reference pages show of the code: a Sphinx extension.

A page says `<!-- generated: NAME -->`. What is generated becomes part of its Markdown before that is read, so that it
cannot be out of date.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from _site import api, benchmarks, configuration, errors, metrics, navigation

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PARTS: dict[str, Callable[[], str]] = {
    "api": api.markdown,
    "benchmarks": benchmarks.markdown,
    "errors": errors.markdown,
    "groups": configuration.groups,
    "keys": configuration.keys,
    "metrics": metrics.markdown,
    "navigation": navigation.markdown,
    "recipes": configuration.recipes,
}


def fill(text: str) -> str:
    """Replace each mark of a page by what is generated for it.

    Raises:
        KeyError: there is no such part.
    """
    return re.sub(r"^<!-- generated: (\w+) -->$", lambda found: PARTS[found[1]](), text, flags=re.M)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _on_source_read)
    return {"parallel_read_safe": True}


def _on_source_read(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = fill(source[0])
