"""Tables on the console, for all verbs and callbacks that print one."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def print_table(table: Table, remarks: Iterable[str] = (), width: int = 100) -> None:
    """Print a table. If standard output is no terminal, it has `width` characters and a frame of ASCII characters.

    The remarks stand below it. They are not wrapped, so that a command in one can be copied.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=width, highlight=False, color_system=None)
    table.box = box.ROUNDED if console.is_terminal else box.ASCII
    console.print(table, markup=False)
    for line in remarks:
        console.print(line, markup=False, soft_wrap=True)


def render_table(headings: Sequence[str], rows: Sequence[Sequence[object]], empty: str) -> str:
    """A table without frames, for lists that other programs read line by line; `empty` if there are no rows.

    A value that is None is left blank.
    """
    if not rows:
        return empty
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row))
    text = io.StringIO()
    # Without a terminal the table is 200 columns wide, so that programs can read one row per line.
    width = shutil.get_terminal_size((200, 24)).columns
    Console(file=text, width=width, markup=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
