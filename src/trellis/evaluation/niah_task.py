"""`trellis eval niah`: the table over models, variants and lengths, and a heat map per model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .. import figures
from ..data.needles import (
    ANSWER_TOKENS,
    VARIANTS,
    Haystack,
    Needles,
    check_variants,
    read_haystack,
    words_sha256,
)
from .niah import check_length, retrieve
from .output import print_table, progress
from .record import Records, slug
from .subject import Subject
from .texts import hash_of

#: A table with more columns is printed by variant.
_COLUMNS = 8


def run(
    subjects: Iterable[Subject],
    haystack: Sequence[str],
    variants: Sequence[str],
    lengths: Sequence[int],
    out: Path,
    *,
    items: int,
    depths: Sequence[int] | None,
    limit: int | None,
    seed: int,
    batch_tokens: int,
) -> list[dict[str, Any]]:
    """Measure every model on every variant at every length; print, keep and draw."""
    check_variants(variants)
    figures.check()
    words = words_sha256()
    count = items if limit is None else min(items, limit)
    # A word has at least a token: no prompt takes more words than its length.
    hay = read_haystack(haystack, words=max(lengths))
    records = Records(out, "niah")
    found = []
    for subject in subjects:
        needles = Needles(subject.tokenizer, hay, seed, "test", len(subject.start))
        for length in lengths:
            check_length(subject, length)
        for variant in variants:
            needles.item(variant, min(lengths), 0)  # a length too short is named at once
        for variant in variants:
            for length in lengths:
                setting = {
                    "variant": variant,
                    "length": length,
                    "items": count,
                    "depths": "random" if depths is None else list(depths),
                    "seed": seed,
                    "answer_tokens": ANSWER_TOKENS,
                    "words_sha256": words,
                    **_about(hay, variant, length),
                }
                measure = partial(
                    _measure, subject, needles, variant, length, count,
                    depths=depths, batch_tokens=batch_tokens,
                )  # fmt: skip
                note = {} if VARIANTS[variant].noise else {"haystack": list(haystack)}
                found.append(records.measured(subject, setting, measure, note=note))
    size = len(variants) * len(lengths)
    groups = [found[first : first + size] for first in range(0, len(found), size)]
    _print(groups, variants, lengths)
    for group in groups:
        path = records.folder / f"{_picture(group)}.png"
        _draw(group, variants, lengths, path)
        print(f"written to {path}")
    return found


def _about(hay: Haystack, variant: str, length: int) -> dict[str, str]:
    """The haystack of a setting: of a text, the words that prompts of that length may take."""
    if VARIANTS[variant].noise:
        return {"haystack": "noise"}
    words = " ".join(hay.essay(length).words)
    return {"haystack": "text", "haystack_sha256": hash_of([words])}


def _measure(
    subject: Subject, needles: Needles, variant: str, length: int, items: int, **options: Any
) -> dict[str, Any]:
    with progress(f"{subject.name}, {variant}, {length}", items) as advance:
        return retrieve(subject, needles, variant, length, items, progress=advance, **options)


def _picture(group: list[dict[str, Any]]) -> str:
    """The name of a model's picture: no other model, nor another setting, has the same."""
    model = group[0]["model"]
    hashes = [value for field, value in model.items() if field.endswith("_sha256")]
    digest = hash_of([*hashes, *(json.dumps(record["setting"]) for record in group)])
    return f"{slug(model['name'])}-heatmap-{digest[:8]}"


def _short(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def _by_column(group: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(r["setting"]["variant"], r["setting"]["length"]): r["result"] for r in group}


def _print(
    groups: list[list[dict[str, Any]]], variants: Sequence[str], lengths: Sequence[int]
) -> None:
    results = [(group[0]["model"]["name"], _by_column(group)) for group in groups]
    together = len(variants) * len(lengths) <= _COLUMNS
    for group in [variants] if together else [[variant] for variant in variants]:
        columns = [(variant, length) for variant in group for length in lengths]
        rows = [
            [name, *(f"{100 * mine[column]['accuracy']:.1f}" for column in columns)]
            for name, mine in results
        ]
        heads = ["model", *(f"{variant}\n{_short(length)}" for variant, length in columns)]
        print_table(heads, rows, "needles found, per cent, by variant and length")


def _draw(
    group: list[dict[str, Any]], variants: Sequence[str], lengths: Sequence[int], path: Path
) -> None:
    """Accuracy over length and depth, one column per variant."""
    rows = _by_column(group)
    depths = sorted({row["depth"] for result in rows.values() for row in result["by_depth"]})
    size = (2 + (1.5 + 0.5 * len(lengths)) * len(variants), 1.5 + 0.3 * len(depths))
    with figures.figure(path, len(variants), figsize=size, squeeze=False) as axes:
        for axis, variant in zip(axes[0], variants):
            shares = [
                {row["depth"]: row["correct"] / row["items"] for row in result["by_depth"]}
                for result in (rows[variant, length] for length in lengths)
            ]
            # No item at a depth, as in a short look, leaves its place empty.
            cells = [[100 * share.get(depth, float("nan")) for share in shares] for depth in depths]
            image = axis.imshow(cells, vmin=0, vmax=100, cmap="viridis", aspect="auto")
            axis.set(title=variant, xlabel="length, tokens")
            axis.set_xticks(range(len(lengths)), map(_short, lengths))
            axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
        axes[0][0].set_ylabel("depth of the needle, per cent")
        bar = axes[0][0].figure.colorbar(image, ax=list(axes[0]))
        bar.set_label(f"{group[0]['model']['name']}: needles found, per cent")
