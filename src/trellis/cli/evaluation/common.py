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
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]

DEFAULT_OUT = Path("runs/eval")


def set_machine(threads: int, device: str) -> None:
    """Raises ValueError at a device that this torch does not have."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device must be one that torch has; got {device!r}: {reason}") from None


def subjects(
    models: list[str], threads: int = 0, device: str = "cpu", context: int = 0
) -> Iterator[Subject]:
    """The models, one loaded at a time.

    All are looked up before the first is measured: whether they are there, and read `context`
    tokens.
    """
    from ...evaluation.model_files import look_up, name_of
    from ...evaluation.subject import load_subject

    set_machine(threads, device)
    for model in models:
        limit = look_up(model)
        if limit is not None and context > limit:
            raise ValueError(
                f"{model} reads at most {limit:,} tokens, but {context:,} are asked for"
            )
    names = [name_of(model) for model in models]
    for model, name in zip(models, names):
        subject = load_subject(model, device)
        if names.count(name) > 1:  # a table tells models apart by their names
            subject.name = subject.about["name"] = model
        yield subject
