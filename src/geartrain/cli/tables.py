"""Tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE = 200
"""Columns where there is no terminal to fit into: nothing is cut in a pipe."""


def make_console() -> Console:
    """A console as wide as the terminal; wide where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDE)
    return console


def print_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    num_text_columns: int = 1,
) -> None:
    """Print a table; columns after the first ones are numbers, flush right."""
    table = Table(box=None, pad_edge=False, show_header=any(head))
    for index, name in enumerate(head):
        justify = "left" if index < num_text_columns else "right"
        table.add_column(Text(name), justify=justify)  # type: ignore[arg-type]  # a Literal
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = make_console()
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())  # cells are padded; pipes need none
