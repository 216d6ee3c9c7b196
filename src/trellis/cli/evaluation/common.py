"""Arguments that all tasks share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ...evaluation.subject import Subject

Models = Annotated[
    list[str],
    typer.Argument(help="Runs, exported folders, or models of transformers.", metavar="MODEL..."),
]
Out = Annotated[Path, typer.Option(help="The folder of results; what is there is not repeated.")]
Limit = Annotated[int | None, typer.Option(help="Only the first so many items.", min=1)]
BatchTokens = Annotated[int, typer.Option(help="Tokens of a batch, about.", min=1)]
Threads = Annotated[int, typer.Option(help="Threads; 0 leaves torch's number.", min=0)]

DEFAULT_OUT = Path("runs/eval")


def subjects(models: list[str], threads: int = 0) -> Iterator[Subject]:
    """The models, one loaded at a time. All names are looked up before the first is measured."""
    import torch

    from ...evaluation.subject import check_exists, load_subject

    if threads:
        torch.set_num_threads(threads)
    for model in models:
        check_exists(model)
    names = [Path(model).name for model in models]
    for model, name in zip(models, names):
        subject = load_subject(model)
        if names.count(name) > 1:  # a table tells models apart by their names
            subject.name = subject.about["name"] = model
        yield subject
