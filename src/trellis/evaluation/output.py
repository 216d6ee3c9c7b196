"""Tables on the terminal, and progress bars."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .scoring import Progress as Advance

#: Of a column: its left line, and a space on both sides.
_BORDER = 3


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """A table whose cells are whole. On a terminal that is too narrow for it, its columns come in
    several tables, each with the first column before them."""
    columns = [[str(head), *(str(row[n]) for row in rows)] for n, head in enumerate(heads)]
    widths = [max(_width(cell) for cell in column) for column in columns]
    room = Console().width if _on_terminal() else sum(widths) + _BORDER * len(widths) + 1
    for group in _fitting(widths, room):
        chosen = [columns[n] for n in group]
        table = Table(title=Text(title) if title else None)
        for head, *_ in chosen:
            table.add_column(Text(head), no_wrap=True)
        for cells in zip(*(cells for _, *cells in chosen)):
            table.add_row(*map(Text, cells))  # as it is: a name may have brackets
        needed = sum(widths[n] for n in group) + _BORDER * len(group) + 1
        Console(width=max(room, needed)).print(table)


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def _width(cell: str) -> int:
    return max(cell_len(line) for line in cell.split("\n"))


def _fitting(widths: Sequence[int], room: int) -> list[list[int]]:
    """Columns of each table: the first, and as many of the next as there is room for."""
    groups, used = [[0]], widths[0] + _BORDER + 1
    for n in range(1, len(widths)):
        own = widths[n] + _BORDER
        if len(groups[-1]) > 1 and used + own > room:
            groups.append([0])
            used = widths[0] + _BORDER + 1
        groups[-1].append(n)
        used += own
    return groups


@contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    """Yields a function that moves a bar on; the bar is shown on terminals only."""
    console = Console(stderr=True)
    label = TextColumn("{task.description}", markup=False)
    columns = (label, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
