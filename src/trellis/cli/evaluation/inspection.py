"""`trellis eval inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import DEFAULT_OUT, Device, Out, Threads, subjects


def inspect(
    model: Annotated[str, typer.Argument(help="A run or an exported folder of ours.")],
    text: Annotated[str | None, typer.Argument(help="What it reads.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file that it reads, instead.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Only the first so many.", min=1)] = None,
    layer: Annotated[
        int | None, typer.Option(help="Draw the heads of this layer; else all layers.", min=0)
    ] = None,
    head: Annotated[int | None, typer.Option(help="Draw this head of the layer.", min=0)] = None,
    probes: Annotated[int, typer.Option(help="Tokens that recall asks for, at most.", min=1)] = 64,
    rank_every: Annotated[
        int, typer.Option(help="Effective rank at every so many tokens.", min=1)
    ] = 1,
    out: Out = DEFAULT_OUT,
    threads: Threads = 0,
    device: Device = "cpu",
) -> None:
    """What the memory does while it reads: a picture, arrays and a table."""
    from ...evaluation import inspection_task

    if (text is None) == (file is None):
        raise ValueError("give either a TEXT or --file FILE")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} must be text in UTF-8: {error}") from error
    assert text is not None
    (subject,) = subjects([model], threads, device)
    source = "the command line" if file is None else str(file)
    inspection_task.run(
        subject, text, out, source=source, tokens=tokens, layer=layer, head=head, probes=probes,
        rank_every=rank_every,
    )  # fmt: skip
