"""Tables on the terminal, and progress bars."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .scoring import Progress as Advance


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """A table as wide as the terminal, or as it needs where there is none."""
    table = Table(*heads, title=title or None)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


@contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    """Yields a function that moves a bar on; the bar is shown on terminals only."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
