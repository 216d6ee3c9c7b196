"""`trellis models`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .options import numbers


def models(
    names: Annotated[list[str] | None, typer.Argument(help="Presets; all by default.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 50257,
    contexts: Annotated[
        str, typer.Option(help="Contexts to give the operations at, separated by commas.")
    ] = "2048,32768",
) -> None:
    """Parameters, state and operations of every mixer at the paper's sizes."""
    from ..mixers import MIXERS
    from ..models.presets import PRESETS, describe

    lengths = numbers("contexts", contexts)
    for name in names or PRESETS:
        rows = {mixer: describe(name, mixer, lengths, vocab_size=vocab_size) for mixer in MIXERS}
        shape = next(iter(rows.values()))
        table = Table(
            "mixer", "MLP", "parameters", "without embeddings", "state per sequence",
            *(f"GFLOP/token at {length}" for length in lengths),
            title=f"{name}: {shape.blocks} blocks of width {shape.width}, {shape.heads} heads",
        )  # fmt: skip
        for mixer, row in rows.items():
            grows = f"grows, {row.growth_bytes / 2**10:.0f} KiB/token"
            size = grows if row.state_bytes is None else f"{row.state_bytes / 2**20:.2f} MiB"
            table.add_row(
                mixer, str(row.mlp), f"{row.parameters:,}",
                f"{row.parameters - row.embeddings:,}", size,
                *(f"{flops / 1e9:.3f}" for flops in row.flops),
            )  # fmt: skip
        Console(width=None if sys.stdout.isatty() else 140).print(table)
    typer.echo(
        "Operations of reading a token, on average over the context; a multiply-add counts as two."
    )
