"""`trellis models`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def models(
    names: Annotated[list[str] | None, typer.Argument(help="Presets; all by default.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 50257,
) -> None:
    """Parameters and state of every mixer at the paper's sizes."""
    from ..mixers import MIXERS
    from ..models.presets import PRESETS, describe

    table = Table("preset", "mixer", "blocks", "width", "heads", "MLP", "parameters",
                  "without embeddings", "state per sequence")  # fmt: skip
    for name in names or PRESETS:
        for mixer in MIXERS:
            row = describe(name, mixer, vocab_size=vocab_size)
            size = "grows" if row.state_bytes is None else f"{row.state_bytes / 2**20:.2f} MiB"
            table.add_row(
                name, mixer, str(row.blocks), str(row.width), str(row.heads), str(row.mlp),
                f"{row.parameters:,}", f"{row.parameters - row.embeddings:,}", size,
            )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 140).print(table)
