"""`trellis eval reasoning`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import names
from .common import DEFAULT_OUT, BatchTokens, Device, Limit, Models, Out, Threads, subjects


def reasoning(
    models: Models,
    data: Annotated[
        Path | None,
        typer.Option(help="A folder of the publishers' files; else the hub is asked."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Of lambada,piqa,hellaswag,winogrande,arc_easy,arc_challenge,siqa; else all."
        ),
    ] = None,
    limit: Limit = None,
    batch_tokens: BatchTokens = 8192,
    out: Out = DEFAULT_OUT,
    threads: Threads = 0,
    device: Device = "cpu",
) -> None:
    """Common-sense tasks through lm-eval: accuracies and their average."""
    from ...evaluation import reasoning_task

    reasoning_task.run(
        subjects(models, threads, device), out,
        data=data, tasks=None if tasks is None else names(tasks),
        limit=limit, batch_tokens=batch_tokens,
    )  # fmt: skip
