"""`trellis eval mqar`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..options import names, numbers
from .common import DEFAULT_OUT, Device, Limit, Out, Threads, set_machine


def mqar(
    mixers: Annotated[str, typer.Option(help="Names separated by commas, or all.")] = "all",
    preset: Annotated[str, typer.Option(help="small, zoology or based.")] = "small",
    widths: Annotated[str | None, typer.Option(help="Widths instead of the preset's.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads, where the mixer takes them.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Half are keys, half values.")] = None,
    steps: Annotated[int | None, typer.Option(help="Most steps of a training.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens of a batch.")] = None,
    easy_first: Annotated[
        float | None, typer.Option(help="Share of the steps with the shortest sequences only.")
    ] = None,
    learning_rates: Annotated[
        str | None, typer.Option(help="Tried in turn; the best on validation is tested.")
    ] = None,
    check_every: Annotated[
        int | None, typer.Option(help="Steps between looks at the accuracy.")
    ] = None,
    random_non_queries: Annotated[
        bool | None, typer.Option(help="Random tokens where nothing is asked, instead of 0.")
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option("--set", help="A field of a mixer, such as trellis.slots=64."),
    ] = None,
    limit: Limit = None,
    out: Out = DEFAULT_OUT,
    threads: Threads = 0,
    seed: Annotated[int, typer.Option(help="Of examples and weights.", min=0)] = 0,
    device: Device = "cpu",
) -> None:
    """Multi-query associative recall: trains small models of every mixer and tests them.

    What --limit counts are test examples. The weights are not kept: another --limit trains again.
    Processes with different --mixers or --widths may share a folder: table and figure show all
    results of the same preset, options and seed that are in it. The figure is PRESET.png; other
    options or another seed than the preset's put a hash of them into its name.
    """
    from ...evaluation import mqar_presets, mqar_task
    from ...mixers import MIXERS
    from ...mixers.registry import check_name

    chosen = list(MIXERS) if mixers == "all" else names(mixers)
    for name in chosen:
        check_name(name)
    base = mqar_presets.preset(preset)
    changed = base.changed(
        widths=tuple(numbers("widths", widths)) if widths else None,
        learning_rates=_rates(learning_rates) if learning_rates else None,
        test_examples=min(limit, base.test_examples) if limit else None,
        heads=heads, layers=layers, vocab_size=vocab_size, steps=steps,
        batch_tokens=batch_tokens, easy_first=easy_first, check_every=check_every,
        random_non_queries=random_non_queries,
    )  # fmt: skip
    set_machine(threads, device)
    mqar_task.run(chosen, changed, out, fields=_fields(fields or []), seed=seed, device=device)


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"--learning-rates must be numbers separated by commas; got {text!r}"
        ) from None


def _fields(settings: list[str]) -> dict[str, dict[str, Any]]:
    """{"trellis": {"slots": 64}} of "trellis.slots=64"."""
    import json

    found: dict[str, dict[str, Any]] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        mixer, dot, field = name.partition(".")
        if not (equals and dot and mixer and field):
            raise ValueError(f"--set must be mixer.field=value; got {setting!r}")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text  # a bare word
        found.setdefault(mixer, {})[field] = value
    return found
