"""Every table of metrics that a page has, in one place."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1]
_TABLE = re.compile(r"^\| metric.*\n(?:\|.*\n)+", re.M)


def markdown() -> str:
    """A section for each page that explains metrics, with its tables."""
    found = {page: _TABLE.findall(page.read_text()) for page in sorted(DOCS.glob("*.md"))}
    return "\n".join(_section(page, tables) for page, tables in found.items() if tables)


def _section(page: Path, tables: list[str]) -> str:
    title = page.read_text().partition("\n")[0].removeprefix("# ")
    return "\n".join([f"## {title}\n", f"Explained in [{title}](../{page.name}).\n", *tables])
