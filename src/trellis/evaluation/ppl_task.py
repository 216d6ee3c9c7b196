"""`trellis eval ppl`: the table over models and context lengths, and the figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .. import figures
from .output import print_table, progress
from .ppl import Text, check_stride, encode, perplexity, saw_more
from .record import Records
from .subject import Subject
from .texts import documents, hash_of


def run(
    subjects: Iterable[Subject],
    data: Sequence[str],
    contexts: Sequence[int],
    out: Path,
    *,
    stride: int | None,
    document_bytes: int | None,
    limit: int | None,
    batch_tokens: int,
) -> list[dict[str, Any]]:
    """Measure every model at every context length; print, keep and draw.

    Raises:
        ValueError: the stride is longer than a context, there is no text, or a model cannot read
            a context.
    """
    check_stride(stride, contexts)
    figures.check()
    texts = documents(data, limit=limit, document_bytes=document_bytes)
    setting = {"data_sha256": hash_of(texts), "documents": len(texts), "stride": stride}
    records = Records(out, "ppl")
    found = []
    for subject in subjects:
        for context in contexts:
            subject.check_context(context, f"a context of {context:,} tokens")
        encoded = [encode(subject, text) for text in texts]
        for context in contexts:
            measure = partial(
                _measure, subject, encoded, context, stride=stride, batch_tokens=batch_tokens
            )
            note = {"data": list(data), **_more(encoded, context, contexts, stride)}
            found.append(records.measured(subject, {**setting, "context": context}, measure, note))
    _print(found, contexts, stride)
    _draw(found, records.folder)
    return found


def _more(
    texts: list[Text], context: int, contexts: Sequence[int], stride: int | None
) -> dict[str, Any]:
    """What a context adds to the next shorter one: predictions from more tokens than that."""
    than = max((other for other in contexts if other < context), default=0)
    return {"shorter": than, "saw_more": saw_more(texts, context, stride, than)}


def _measure(subject: Subject, texts: list[Text], context: int, **options: Any) -> dict[str, Any]:
    total = sum(len(text.ids) - 1 for text in texts)
    with progress(f"{subject.name}, {context}", total) as advance:
        return perplexity(subject, texts, context, progress=advance, **options)


def _print(found: list[dict[str, Any]], contexts: Sequence[int], stride: int | None) -> None:
    names = list(dict.fromkeys(record["model"]["name"] for record in found))
    by_place = {(r["model"]["name"], r["setting"]["context"]): r["result"] for r in found}
    windows = "disjoint windows" if stride is None else f"windows sliding by {stride}"
    for what, title in (
        ("perplexity", "perplexity per token"),
        ("bits_per_byte", "bits per byte"),
    ):
        rows = [[n, *(f"{by_place[n, c][what]:.3f}" for c in contexts)] for n in names]
        print_table(["model", *map(str, contexts)], rows, f"{title} by context, {windows}")
    for record in found:
        note, context = record["note"], record["setting"]["context"]
        if note["shorter"] and not note["saw_more"]:
            print(
                f"{record['model']['name']}: {context} tokens of context are no more than "
                f"{note['shorter']}, since no document has as many"
            )
        elif note["shorter"]:
            print(
                f"{record['model']['name']}, context {context}: {note['saw_more']:,} of "
                f"{record['result']['tokens']:,} tokens are predicted from more than "
                f"{note['shorter']}"
            )


def _draw(found: list[dict[str, Any]], folder: Path) -> None:
    """Loss over the position in the longest context of each model."""
    longest: dict[str, dict[str, Any]] = {}
    for record in found:
        name = record["model"]["name"]
        if (
            name not in longest
            or record["setting"]["context"] > longest[name]["setting"]["context"]
        ):
            longest[name] = record
    with figures.figure(folder / "by-position.png", figsize=(7, 4.5)) as axis:
        for name, record in longest.items():
            rows = record["result"]["by_position"]
            axis.plot([r["to"] for r in rows], [r["loss"] for r in rows], "o-", label=name)
        axis.set(xscale="log", xlabel="tokens of context, up to", ylabel="loss, nats per token")
        axis.grid(alpha=0.3)
        axis.legend()
