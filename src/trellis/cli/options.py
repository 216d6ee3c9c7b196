"""What several commands share: options, lists in options, and tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

from typer import Option


def _set_threads(threads: int) -> int:
    import torch

    if threads:
        torch.set_num_threads(threads)
    return threads


#: Parsing the option sets the threads: no command needs its value.
Threads = Annotated[
    int, Option(help="Threads; 0 leaves torch's number.", min=0, callback=_set_threads)
]


def numbers(
    name: str, text: str, least: int = 1, most: int | None = None, instead: str = ""
) -> list[int]:
    """Whole numbers from `least` to `most`, separated by commas.

    instead: for the error, what else may be given.

    Raises:
        ValueError: they are something else.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least or (most is not None and max(found) > most):
        bounds = "" if most is None else f" from {least} to {most}"
        other = f", or {instead}" if instead else ""
        raise ValueError(
            f"--{name} must be whole numbers{bounds} separated by commas{other}; got {text!r}"
        )
    return found


def names(text: str) -> list[str]:
    """Names separated by commas, with or without spaces."""
    return [part.strip() for part in text.split(",")]


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """A table whose cells are never cut. Where the terminal is too narrow for it, the columns come
    in several tables, each with the first column before them."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def table_of(places: Sequence[int]) -> Table:
        table = Table(title=Text(title) if title else None)
        for n in places:
            table.add_column(Text(heads[n]), no_wrap=True)
        for row in rows:
            table.add_row(*(Text(str(row[n])) for n in places))  # a name may have brackets
        return table

    endless = Console(width=100_000)
    room = Console().width if _on_terminal() else endless.width
    groups = [[0]]
    for n in range(1, len(heads)):
        wider = endless.measure(table_of([*groups[-1], n])).maximum
        if len(groups[-1]) > 1 and wider > room:
            groups.append([0])
        groups[-1].append(n)
    for group in groups:
        endless.print(table_of(group))


def _on_terminal() -> bool:
    return sys.stdout.isatty()
