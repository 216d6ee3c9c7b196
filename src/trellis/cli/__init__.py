"""The `trellis` command: parses, calls, prints."""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import rich  # noqa: F401
    import typer
except ModuleNotFoundError as error:
    sys.exit(f"the trellis command needs {error.name}: pip install 'trellis-memory[cli]'")

from .. import __version__
from ..threads import sleep_while_waiting
from . import bench, convert, data, evaluation, forecast, serve, train
from .options import Program

app = Program(no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(data.app, name="data")
for command in (
    train.train, train.compare, convert.convert, train.generate, serve.serve, train.export,
    train.plot, train.models,
):  # fmt: skip
    app.command(prints_result=command is train.generate)(command)
app.add_typer(evaluation.app, name="eval")
app.add_typer(forecast.app, name="forecast")
app.add_typer(bench.app, name="bench")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"trellis {__version__}")
        raise typer.Exit


@app.callback()
def trellis(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Sequence models whose memory is bounded and learns while it reads."""


def main() -> None:
    sleep_while_waiting()
    try:
        app()
    except (ValueError, OSError, ModuleNotFoundError) as error:
        sys.exit(f"trellis: {error}")
