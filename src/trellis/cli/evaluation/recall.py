"""`trellis eval recall`."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import DEFAULT_OUT, BatchTokens, Device, Limit, Models, Out, Threads, subjects

_FORMS = ".jsonl, .json or .parquet, or hub:NAME"


def recall(
    models: Models,
    squad: Annotated[
        str | None, typer.Option(help=f"SQuAD: completions ({_FORMS}), or SQuAD 1.1's own .json.")
    ] = None,
    swde: Annotated[str | None, typer.Option(help=f"SWDE: {_FORMS}.")] = None,
    fda: Annotated[str | None, typer.Option(help=f"FDA: {_FORMS}.")] = None,
    context_tokens: Annotated[
        int | None,
        typer.Option(help="Cut documents to so many tokens around the answer (950).", min=1),
    ] = None,
    limit: Limit = None,
    batch_tokens: BatchTokens = 8192,
    out: Out = DEFAULT_OUT,
    threads: Threads = 0,
    device: Device = "cpu",
) -> None:
    """Recall of an answer from its text: SQuAD completion, SWDE and FDA, in per cent."""
    from ...evaluation import recall_task

    given = {"squad": squad, "swde": swde, "fda": fda}
    recall_task.run(
        subjects(models, threads, device),
        {name: source for name, source in given.items() if source is not None},
        out, context_tokens=context_tokens, limit=limit, batch_tokens=batch_tokens,
    )  # fmt: skip
