"""The side bar of the site: the list of all pages that docs/index.md has in plain Markdown."""

from __future__ import annotations

import re
from pathlib import Path

_INDEX = Path(__file__).parents[1] / "index.md"


def markdown() -> str:
    """A hidden table of contents for each paragraph of links, under its first words."""
    trees = []
    for caption, text in re.findall(r"^\*\*(.+?)\.\*\* (.+?)$(?:\n\n|\Z)", _INDEX.read_text(), re.M | re.S):
        pages = "\n".join(link.removesuffix(".md") for link in re.findall(r"\]\(([^)]+\.md)\)", text))
        trees.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```")
    return "\n\n".join(trees)
