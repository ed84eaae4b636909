"""Tables on the console."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence


def render_table(headings: Sequence[str], rows: Sequence[Sequence[object]], empty: str) -> str:
    """A table without frames.

    Args:
        headings: of the columns.
        rows: a value for each column; None is left blank.
        empty: what to say where there are no rows.
    """
    if not rows:
        return empty
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row))
    text = io.StringIO()
    # Where the output is no terminal, nothing is cut or wrapped: other programs read it line by line.
    width = shutil.get_terminal_size((200, 24)).columns
    Console(file=text, width=width, markup=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
