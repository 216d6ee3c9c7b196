"""`trellis eval recall`: the table over models and sets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .output import print_table, progress
from .recall import MAX_TOKENS, STOP, encode, measure
from .recall_data import Set, load_set
from .record import Records
from .subject import Subject
from .texts import hash_of


def run(
    subjects: Iterable[Subject],
    sources: Mapping[str, str],
    out: Path,
    *,
    context_tokens: int | None,
    limit: int | None,
    batch_tokens: int,
) -> list[dict[str, Any]]:
    """Measure every model on every set that is given; print and keep.

    Raises:
        ValueError: no set is given, one is malformed, or a model cannot read it.
    """
    if not sources:
        raise ValueError("there is nothing to measure on: give --squad, --swde or --fda")
    sets = [load_set(name, source, limit) for name, source in sources.items()]
    settings = [_setting(one, context_tokens) for one in sets]
    records = Records(out, "recall")
    found = []
    for subject in subjects:
        # All sets are read before the first is measured: one that is too long shows at once.
        prompts = [encode(subject, one.items, context_tokens) for one in sets]
        for one, setting, encoded in zip(sets, settings, prompts):
            task = partial(_measure, subject, one, encoded, batch_tokens)
            found.append(records.measured(subject, setting, task, note={"data": one.source}))
    _print(found, sets, context_tokens)
    return found


def _setting(one: Set, context_tokens: int | None) -> dict[str, Any]:
    # Everything but where items stand. The answer's place matters: documents are cut around it.
    content = [json.dumps(item[1:]) for item in one.items]
    return {
        "set": one.name,
        "form": one.form,
        "data_sha256": hash_of(content),
        "items": len(one.items),
        "context_tokens": context_tokens,
        "max_tokens": MAX_TOKENS,
        "stop": STOP,
    }


def _measure(
    subject: Subject, one: Set, prompts: Sequence[Sequence[int]], batch_tokens: int
) -> dict[str, Any]:
    with progress(f"{subject.name}, {one.name}", len(prompts)) as advance:
        return measure(subject, one.items, prompts, batch_tokens=batch_tokens, progress=advance)


def _print(found: list[dict[str, Any]], sets: list[Set], context_tokens: int | None) -> None:
    rows = []
    for begin in range(0, len(found), len(sets)):
        group = found[begin : begin + len(sets)]
        scores = [100 * record["result"]["accuracy"] for record in group]
        average = sum(scores) / len(scores)
        rows.append([group[0]["model"]["name"], *(f"{s:.1f}" for s in (*scores, average))])
    heads = ["model", *(f"{one.name} ({len(one.items):,})" for one in sets), "average"]
    form = "whole texts" if context_tokens is None else f"cut to {context_tokens:,} tokens"
    print_table(heads, rows, f"recall, % (items), {form}")
    for one in sets:
        absent = sum(item.span is None for item in one.items)
        if absent:
            print(f"{one.name}: {absent:,} of {len(one.items):,} documents do not hold the answer")
