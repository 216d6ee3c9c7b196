"""The `trellis` command: parses, calls, prints."""

from __future__ import annotations

import sys

try:
    import rich  # noqa: F401
    import typer
except ModuleNotFoundError as error:
    sys.exit(f"the trellis command needs {error.name}: pip install 'trellis-memory[cli]'")

from . import bench, data, evaluation, models, train

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(data.app, name="data")
for command in (
    train.train, train.compare, train.generate, train.export, train.plot, models.models,
):  # fmt: skip
    app.command()(command)
app.add_typer(evaluation.app, name="eval")
app.add_typer(bench.app, name="bench")


@app.callback()
def trellis() -> None:
    """Sequence models whose memory is bounded and learns while it reads."""


def main() -> None:
    try:
        app()
    except (ValueError, OSError, ModuleNotFoundError) as error:
        sys.exit(f"trellis: {error}")
