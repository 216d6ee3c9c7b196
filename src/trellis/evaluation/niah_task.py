"""`trellis eval niah`: the table over models, variants and lengths, and a heat map per model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..data.haystack import Haystack, read_haystack
from ..data.needles import ANSWER_TOKENS, VARIANTS, Needles, check_variants
from ..figures import figure
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
    count = items if limit is None else min(items, limit)
    # A word has at least a token: no prompt takes more words than its length.
    hay = read_haystack(haystack, words=max(lengths))
    records = Records(out, "niah")
    found = []
    for subject in subjects:
        needles = Needles(subject.tokenizer, hay, seed, "test")
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
                    **_about(hay, haystack, variant, length),
                }
                measure = partial(
                    _measure, subject, needles, variant, length, count,
                    depths=depths, batch_tokens=batch_tokens,
                )  # fmt: skip
                found.append(records.measured(subject, setting, measure))
    _print(found, variants, lengths)
    for name in _names(found):
        mine = [record for record in found if record["model"]["name"] == name]
        _draw(mine, variants, lengths, records.folder / f"{slug(name)}-heatmap.png", name)
    return found


def _about(
    hay: Haystack, sources: Sequence[str], variant: str, length: int
) -> dict[str, str | list[str]]:
    """The haystack of a setting: of a text, the words that prompts of that length may take."""
    if VARIANTS[variant].noise:
        return {"haystack": "noise"}
    words = " ".join(hay.essay(length).words)
    return {"haystack": list(sources), "haystack_sha256": hash_of([words])}


def _measure(
    subject: Subject, needles: Needles, variant: str, length: int, items: int, **options: Any
) -> dict[str, Any]:
    with progress(f"{subject.name}, {variant}, {length}", items) as advance:
        return retrieve(subject, needles, variant, length, items, progress=advance, **options)


def _names(found: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(record["model"]["name"] for record in found))


def _short(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def _print(found: list[dict[str, Any]], variants: Sequence[str], lengths: Sequence[int]) -> None:
    place = {
        (r["model"]["name"], r["setting"]["variant"], r["setting"]["length"]): r["result"]
        for r in found
    }
    names = _names(found)
    together = len(variants) * len(lengths) <= _COLUMNS
    for group in [variants] if together else [[variant] for variant in variants]:
        columns = [(variant, length) for variant in group for length in lengths]
        rows = [
            [name, *(f"{100 * place[name, v, n]['accuracy']:.1f}" for v, n in columns)]
            for name in names
        ]
        heads = ["model", *(f"{variant}\n{_short(length)}" for variant, length in columns)]
        print_table(heads, rows, "needles found, per cent, by variant and length")


def _draw(
    found: list[dict[str, Any]],
    variants: Sequence[str],
    lengths: Sequence[int],
    path: Path,
    name: str,
) -> None:
    """Accuracy over length and depth, one column per variant."""
    rows = {(r["setting"]["variant"], r["setting"]["length"]): r["result"] for r in found}
    depths = sorted({row["depth"] for result in rows.values() for row in result["by_depth"]})
    size = (2 + (1.5 + 0.5 * len(lengths)) * len(variants), 1.5 + 0.3 * len(depths))
    with figure(path, len(variants), figsize=size, squeeze=False) as axes:
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
        bar.set_label(f"{name}: needles found, per cent")
