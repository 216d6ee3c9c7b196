"""`trellis eval niah`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..options import names, numbers
from .common import DEFAULT_OUT, BatchTokens, Device, Limit, Models, Out, Threads, subjects


def niah(
    models: Models,
    haystack: Annotated[
        list[str] | None,
        typer.Option(help="Text that hides needles: files, folders, archives; else stdlib."),
    ] = None,
    variants: Annotated[
        str,
        typer.Option(help="passkey (S-NIAH-1), number (S-NIAH-2), uuid (S-NIAH-3), word."),
    ] = "passkey,number,uuid",
    lengths: Annotated[
        str, typer.Option(help="Tokens of a prompt and 128 for its answer, at most.")
    ] = "1024,2048,4096,8192,16384,32768",
    depths: Annotated[
        str, typer.Option(help="Per cent of the text before the needle, in turn; or random.")
    ] = "0,10,20,30,40,50,60,70,80,90,100",
    items: Annotated[int, typer.Option(help="Of each variant and length.", min=1)] = 100,
    limit: Limit = None,
    seed: Annotated[int, typer.Option(help="Of keys, values and random depths.")] = 42,
    batch_tokens: BatchTokens = 8192,
    out: Out = DEFAULT_OUT,
    threads: Threads = 0,
    device: Device = "cpu",
) -> None:
    """Needles in a haystack (RULER's S-NIAH): accuracy by length and depth."""
    from ...evaluation import niah_task

    places = None
    if depths != "random":
        places = numbers("depths", depths, least=0, most=100, instead="random")
    tokens = numbers("lengths", lengths)
    niah_task.run(
        subjects(models, threads, device, context=max(tokens)), haystack or ["stdlib"],
        names(variants), tokens, out,
        items=items, depths=places, limit=limit, seed=seed, batch_tokens=batch_tokens,
    )  # fmt: skip
