"""`trellis eval ppl`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..options import numbers
from .common import DEFAULT_OUT, BatchTokens, Device, Limit, Models, Out, Threads, subjects


def ppl(
    models: Models,
    data: Annotated[
        list[str], typer.Option(help="Text: files, folders, archives, jsonl, stdlib, hub:NAME.")
    ],
    contexts: Annotated[str, typer.Option(help="Context lengths.")] = "512,1024,2048,4096,8192",
    stride: Annotated[
        int | None, typer.Option(help="Sliding windows that move so far; else disjoint.", min=1)
    ] = None,
    document_bytes: Annotated[
        int | None, typer.Option(help="Of each document, only the first so many bytes.", min=1)
    ] = None,
    limit: Limit = None,
    batch_tokens: BatchTokens = 8192,
    out: Out = DEFAULT_OUT,
    threads: Threads = 0,
    device: Device = "cpu",
) -> None:
    """Perplexity by context length, and by position in the context. Items are documents."""
    from ...evaluation import ppl_task

    lengths = numbers("contexts", contexts)
    ppl_task.run(
        subjects(models, threads, device, max(lengths)), data, lengths, out,
        stride=stride, document_bytes=document_bytes, limit=limit, batch_tokens=batch_tokens,
    )  # fmt: skip
