"""What several commands share: options, lists in options, results and tables."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from typer import Option, Typer


def _set_threads(threads: int) -> int:
    import torch

    if threads:
        torch.set_num_threads(threads)
    return threads


#: Whether this is the only process, or the first of those that torchrun started.
FIRST = os.environ.get("RANK", "0") == "0"
#: Parsing the option sets the threads: no command needs its value.
Threads = Annotated[
    int, Option(help="Threads; 0 leaves torch's number.", min=0, max=4096, callback=_set_threads)
]


def _check_device(device: str) -> str:
    """Raises ValueError at a device that this torch does not have."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device must be one that torch has; got {device!r}: {reason}") from None
    return device


Device = Annotated[str, Option(help="cpu, cuda, cuda:1, mps.", callback=_check_device)]
_JSON = Annotated[
    bool, Option("--json", help="Print the result as JSON, and all else to the standard error.")
]
_QUIET = Annotated[bool, Option("--quiet", help="Print errors only, and JSON if asked for.")]


def reporting(command: Callable[..., Any], prints_result: bool = False) -> Callable[..., None]:
    """A command that returns its result, with the options --json and --quiet.

    prints_result: what the command prints is itself the result, which --quiet leaves.
    Where the result has a list `left_out`, of what could not be done, the command ends with these
    lines as an error, after what could be done is printed.
    """

    @functools.wraps(command)
    def run(*arguments: Any, as_json: bool, quiet: bool, **given: Any) -> None:
        out = sys.stdout
        with contextlib.ExitStack() as stack:
            if quiet:
                nothing = stack.enter_context(open(os.devnull, "w", errors="replace"))
                stack.enter_context(contextlib.redirect_stderr(nothing))
            if as_json or (quiet and not prints_result):
                stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            result = command(*arguments, **given)
        if as_json and FIRST:
            out.write(json.dumps(result, indent=1, default=str) + "\n")
        if isinstance(result, dict) and result.get("left_out"):
            sys.exit("\n".join(f"trellis: {line}" for line in result["left_out"]))

    inner = inspect.signature(command, eval_str=True)
    more = {"as_json": _JSON, "quiet": _QUIET}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in more.items()
    ]
    run.__signature__ = inner.replace(  # type: ignore[attr-defined]
        parameters=[*inner.parameters.values(), *added], return_annotation=None
    )
    run.__annotations__ = {**command.__annotations__, **more, "return": None}
    return run


class Program(Typer):
    """A group of commands, each of which returns its result; see `reporting`."""

    def command(self, *arguments: Any, prints_result: bool = False, **options: Any) -> Any:
        def register(command: Callable[..., Any]) -> Any:
            add = super(Program, self).command(*arguments, help=help_of(command), **options)
            return add(reporting(command, prints_result))

        return register


def help_of(command: Callable[..., Any]) -> str:
    """The docstring of a command as its help: a line for each paragraph, which the terminal's width
    then wraps, and brackets that rich shows instead of taking them for its markup."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(text.split()) for text in paragraphs).replace("[", "\\[")


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
