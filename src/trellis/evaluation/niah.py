"""`trellis eval niah`: how often a model says the value that a long text hides.

Items are built in `trellis.data.needles`, as RULER builds its single needles. Decoding is greedy,
and an answer is right if the value occurs in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .. import figures
from ..data import needles as needle_data
from ..data.needles import ANSWER_TOKENS, VARIANTS, Needles
from .models import EvaluatedModel
from .runner import Job, Record, Records, Report, Table, hash_of, slug
from .scoring import BATCH_TOKENS, Progress, complete

#: A table with more columns than this is cut into one table for each variant.
_COLUMNS = 8
#: Prompts are built and answered in groups of about this many tokens.
_PROMPT_TOKENS = 2**20
_CONTROL = re.compile(r"[\x00-\x1f]")


def run(
    models: Iterable[EvaluatedModel],
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
) -> Report:
    """Measures every model on every variant at every length.

    depths: per cent of the text before the needle, taken in turn; None draws one for each item.
    """
    needle_data.check_variants(variants)
    figures.check()
    count = items if limit is None else min(items, limit)
    # A word has at least one token, so no prompt takes more words than its length.
    hay = needle_data.read_haystack(haystack, words=max(lengths))

    shared = {
        "items": count,
        "depths": "random" if depths is None else list(depths),
        "seed": seed,
        "answer_tokens": ANSWER_TOKENS,
        "words_sha256": needle_data.words_sha256(),
    }

    def taken(variant: str, length: int) -> dict[str, str]:
        """The haystack in a setting: for a text, a hash of the words that prompts may take."""
        if VARIANTS[variant].noise:
            return {"haystack": "noise"}
        return {"haystack": "text", "haystack_sha256": hash_of([" ".join(hay.essay(length).words)])}

    def jobs(model: EvaluatedModel) -> list[Job]:
        needles = Needles(model.tokenizer, hay, seed, "test", len(model.start))
        for length in lengths:
            model.check_context(length, "a prompt with its answer")
        for variant in variants:
            needles.item(variant, min(lengths), 0)  # raises where the length is too short
        return [
            Job(
                setting={"variant": variant, "length": length, **shared, **taken(variant, length)},
                measure=partial(
                    retrieve, model, needles, variant, length, count,
                    depths=depths, batch_tokens=batch_tokens,
                ),
                label=f"{variant}, {length}",
                total=count,
                note={} if VARIANTS[variant].noise else {"haystack": list(haystack)},
            )
            for variant in variants
            for length in lengths
        ]  # fmt: skip

    records = Records(out, "niah")
    found = records.measure(models, jobs)
    pictures = [records.folder / f"{_picture(group)}.png" for group in found]
    for group, path in zip(found, pictures):
        _draw(group, variants, lengths, path)
    shown: list[Any] = list(_tables(found, variants, lengths))
    return Report([record for group in found for record in group], shown, pictures)


def retrieve(
    model: EvaluatedModel,
    needles: Needles,
    variant: str,
    length: int,
    items: int,
    *,
    depths: Sequence[int] | None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = lambda done: None,
) -> dict[str, Any]:
    """The share of right answers among the first `items`, also by depth, and every answer."""
    digest = hashlib.sha256()
    answers: list[dict[str, Any]] = []
    size = max(1, _PROMPT_TOKENS // length)
    for first in range(0, items, size):
        numbers = range(first, min(first + size, items))
        built = [needles.item(variant, length, index, depths) for index in numbers]
        prompts = [[*model.start, *model.tokenizer.encode(item.prompt).tolist()] for item in built]
        texts = complete(
            model, prompts, max_tokens=ANSWER_TOKENS, batch_tokens=batch_tokens, progress=progress,
            # An answer that has said its value ends: later words cannot make it wrong.
            enough=lambda n, text, items=built: matches(text, items[n].value),  # type: ignore[misc]
        )  # fmt: skip
        for item, text in zip(built, texts):
            digest.update(item.prompt.encode())
            answers.append({
                "correct": matches(text, item.value), "depth": item.depth, "key": item.key,
                "value": item.value, "answer": text, "units": item.units, "tokens": item.tokens,
            })  # fmt: skip
    return {
        "accuracy": sum(answer["correct"] for answer in answers) / len(answers),
        "by_depth": by_depth(answers, exact=depths is not None),
        "prompts_sha256": digest.hexdigest(),
        "items": answers,
    }


def matches(text: str, value: str) -> bool:
    """RULER's string_match_all for one value."""
    return value.lower() in _CONTROL.sub("\n", text.strip()).strip().lower()


def by_depth(answers: Sequence[dict[str, Any]], exact: bool) -> list[dict[str, Any]]:
    """Right answers and items at every depth; unless `exact`, depths are rounded to tenths."""
    found: dict[float, list[bool]] = {}
    for answer in answers:
        # Halves are rounded up: round() takes them to even tenths.
        depth = answer["depth"] if exact else 10 * int(answer["depth"] / 10 + 0.5)
        found.setdefault(depth, []).append(answer["correct"])
    return [
        {"depth": depth, "correct": sum(found[depth]), "items": len(found[depth])}
        for depth in sorted(found)
    ]


def _short(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def _by_column(group: list[Record]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(r["setting"]["variant"], r["setting"]["length"]): r["result"] for r in group}


def _tables(
    found: list[list[Record]], variants: Sequence[str], lengths: Sequence[int]
) -> Iterator[Table]:
    results = [(group[0]["model"]["name"], _by_column(group)) for group in found]
    together = len(variants) * len(lengths) <= _COLUMNS
    for chosen in [variants] if together else [[variant] for variant in variants]:
        columns = [(variant, length) for variant in chosen for length in lengths]
        rows = [
            [name, *(f"{100 * mine[column]['accuracy']:.1f}" for column in columns)]
            for name, mine in results
        ]
        heads = ["model", *(f"{variant}\n{_short(length)}" for variant, length in columns)]
        yield Table("needles found, per cent, by variant and length", heads, rows)


def _picture(group: list[Record]) -> str:
    """The name of a model's heat map, with a hash of the model and of all its settings."""
    model = group[0]["model"]
    hashes = [value for field, value in model.items() if field.endswith("_sha256")]
    digest = hash_of([*hashes, *(json.dumps(record["setting"]) for record in group)])
    return f"{slug(model['name'])}-heatmap-{digest[:8]}"


def _draw(group: list[Record], variants: Sequence[str], lengths: Sequence[int], path: Path) -> None:
    """Accuracy by length and depth, one panel for each variant."""
    rows = _by_column(group)
    depths = sorted({row["depth"] for result in rows.values() for row in result["by_depth"]})
    size = (2 + (1.5 + 0.5 * len(lengths)) * len(variants), 1.5 + 0.3 * len(depths))
    with figures.figure(path, len(variants), figsize=size, squeeze=False) as axes:
        for axis, variant in zip(axes[0], variants):
            shares = [
                {row["depth"]: row["correct"] / row["items"] for row in result["by_depth"]}
                for result in (rows[variant, length] for length in lengths)
            ]
            # With few items, some depths have none; their cells stay empty.
            cells = [[100 * share.get(depth, float("nan")) for share in shares] for depth in depths]
            image = axis.imshow(cells, vmin=0, vmax=100, cmap="viridis", aspect="auto")
            axis.set(title=variant, xlabel="length, tokens")
            axis.set_xticks(range(len(lengths)), map(_short, lengths))
            axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
        axes[0][0].set_ylabel("depth of the needle, per cent")
        bar = axes[0][0].figure.colorbar(image, ax=list(axes[0]))
        bar.set_label(f"{group[0]['model']['name']}: needles found, per cent")
