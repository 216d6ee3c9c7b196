"""`trellis data`."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="From text to token shards.")


@app.callback()
def data() -> None:
    """From text to token shards."""
