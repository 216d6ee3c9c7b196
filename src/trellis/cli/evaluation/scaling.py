"""`trellis eval scaling`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import DEFAULT_OUT, Device, Limit, Out, Threads, set_machine


def scaling(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of `trellis train`.", metavar="RUN...")
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(help="Measure the newest checkpoints on this text, with --context."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens read at once, with --data.", min=1)
    ] = None,
    bits_per_byte: Annotated[
        bool, typer.Option("--bits-per-byte", help="Draw and fit bits per byte.")
    ] = False,
    document_bytes: Annotated[
        int | None, typer.Option(help="Of each document, only the first so many bytes.", min=1)
    ] = None,
    limit: Limit = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a batch, about; 8192 unless given.", min=1)
    ] = None,
    out: Out = DEFAULT_OUT,
    threads: Threads = 0,
    device: Device = "cpu",
) -> None:
    """Perplexity over training FLOPs: the validations that runs recorded, or of --data."""
    from ...evaluation import scaling_task

    set_machine(threads, device)
    scaling_task.run(
        runs, out, data=data or [], context=context, bits_per_byte=bits_per_byte,
        document_bytes=document_bytes, limit=limit, batch_tokens=batch_tokens,
        device=device,
    )  # fmt: skip
