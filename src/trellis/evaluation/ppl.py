"""`trellis eval ppl`: perplexity by context length, and by position in the context.

A document is the tokens of its text after the token that texts start with. A window of L tokens
predicts its L next tokens, so that every token of a document is predicted once. With disjoint
windows a prediction sees at most L tokens. Sliding windows move by `stride` tokens and count only
their last `stride` predictions, which see at least L - stride tokens, if the document has as many.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import figures
from ..data.sources import whole_texts
from ..training.metrics import perplexity_of
from .models import EvaluatedModel
from .runner import Job, Record, Records, Report, Table, hash_of
from .scoring import BATCH_TOKENS, Progress, batches, token_losses


class Text(NamedTuple):
    """One document: token ids after the starting token, and the bytes that are predicted."""

    ids: list[int]
    size: int


class Window(NamedTuple):
    """A window predicts ids[i + 1] from ids[: i + 1], for i from `first` on."""

    ids: list[int]
    first: int


def run(
    models: Iterable[EvaluatedModel],
    data: Sequence[str],
    contexts: Sequence[int],
    out: Path,
    *,
    stride: int | None,
    document_bytes: int | None,
    limit: int | None,
    batch_tokens: int,
) -> Report:
    """Measures every model at every context length on the documents of `data`.

    Raises ValueError if the stride is longer than a context, there is no text, or a model cannot
    read a context.
    """
    check_stride(stride, contexts)
    figures.check()
    texts = documents(data, limit, document_bytes)
    shared = {"data_sha256": hash_of(texts), "documents": len(texts), "stride": stride}

    def jobs(model: EvaluatedModel) -> list[Job]:
        for context in contexts:
            model.check_context(context, f"a context of {context:,} tokens")
        encoded = [encode(model, text) for text in texts]
        found = []
        for context in contexts:
            # How many predictions see more tokens than the next shorter context shows them.
            shorter = max((other for other in contexts if other < context), default=0)
            gain = saw_more(encoded, context, stride, shorter)
            note = {"data": list(data), "shorter": shorter, "saw_more": gain}
            setting = {**shared, "context": context}
            found.append(job(model, encoded, setting, note, batch_tokens, stride))
        return found

    records = Records(out, "ppl")
    found = records.measure(models, jobs)
    picture = records.folder / "by-position.png"
    _draw(found, picture)
    shown: list[Any] = [*_tables(found, contexts, stride), *_lines(found)]
    return Report([record for group in found for record in group], shown, [picture])


def job(
    model: EvaluatedModel,
    texts: Sequence[Text],
    setting: dict[str, Any],
    note: dict[str, Any],
    batch_tokens: int,
    stride: int | None = None,
) -> Job:
    """The measurement of perplexity with the context that a setting has."""
    context = setting["context"]
    look = partial(perplexity, model, texts, context, stride=stride, batch_tokens=batch_tokens)
    total = sum(len(text.ids) - 1 for text in texts)
    return Job(setting, look, f"context {context}", total, note)


def documents(
    sources: Sequence[str], limit: int | None = None, document_bytes: int | None = None
) -> list[str]:
    """The first `limit` documents of any sources of text, each cut to `document_bytes` bytes."""
    found: list[str] = []
    for text in whole_texts(sources):
        if document_bytes is not None:
            text = text.encode()[:document_bytes].decode(errors="ignore")
        if text:
            found.append(text)
        if limit is not None and len(found) == limit:
            break
    if not found:
        raise ValueError(f"there is no text in {', '.join(sources)}")
    return found


def encode(model: EvaluatedModel, text: str) -> Text:
    """Tokens of a document. Without a starting token, the first token is not predicted."""
    ids = model.tokenizer.encode(text).tolist()
    size = len(text.encode())
    if not model.start and ids:
        size -= len(model.tokenizer.decode(ids[:1]).encode())
    return Text([*model.start, *ids], size)


def windows(text: Text, context: int, stride: int | None) -> Iterator[Window]:
    """Windows of `context` tokens, each with one more token as the last target."""
    step = context if stride is None else stride
    done = 0  # predictions so far
    total = len(text.ids) - 1
    while done < total:
        stop = min(done + (context if done == 0 else step), total)
        begin = max(0, stop - context) if stride is not None else done
        yield Window(text.ids[begin : stop + 1], done - begin)
        done = stop


def check_stride(stride: int | None, contexts: Sequence[int]) -> None:
    """Raises ValueError at a stride that would leave tokens unpredicted."""
    if stride is not None and not 1 <= stride <= min(contexts):
        raise ValueError(
            f"--stride must be from 1 to the shortest context, {min(contexts)}; got {stride}"
        )


def saw_more(texts: Sequence[Text], context: int, stride: int | None, than: int) -> int:
    """The number of tokens that are predicted from more than `than` tokens before them."""
    cut = (window for text in texts for window in windows(text, context, stride))
    return sum(max(0, len(window.ids) - 1 - max(window.first, than)) for window in cut)


def perplexity(
    model: EvaluatedModel,
    texts: Sequence[Text],
    context: int,
    *,
    stride: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    beyond: int | None = None,
    progress: Progress = lambda done: None,
) -> dict[str, Any]:
    """Loss per token and per byte over windows of `context` tokens, and by position in them.

    beyond: also the loss of the tokens that are predicted from more than so many, in `beyond`.
    """
    model.check_context(context, f"a context of {context:,} tokens")
    check_stride(stride, [context])
    cut = [window for text in texts for window in windows(text, context, stride)]
    if not cut:
        raise ValueError("there is nothing to predict: the texts have no tokens")
    # Sums by position: entry i is of predictions from exactly i + 1 tokens.
    loss = torch.zeros(context, dtype=torch.float64)
    count = torch.zeros(context, dtype=torch.long)
    for batch in batches([len(window.ids) for window in cut], batch_tokens):
        chosen = [cut[n] for n in batch]
        for window, losses in zip(chosen, token_losses(model, [w.ids for w in chosen])):
            predicted = slice(window.first, len(losses))
            loss[predicted] += losses[predicted].double().cpu()
            count[predicted] += 1
        progress(sum(len(window.ids) - 1 - window.first for window in chosen))
    total, tokens = float(loss.sum()), int(count.sum())
    size = sum(text.size for text in texts)
    far = {} if beyond is None else {"beyond": _mean(loss[beyond:], count[beyond:])}
    return {
        **far,
        "loss": total / tokens,
        "perplexity": perplexity_of(total / tokens),
        "bits_per_byte": total / math.log(2) / size,
        "tokens": tokens,
        "bytes": size,
        "by_position": _by_position(loss, count),
    }


def _mean(loss: Tensor, count: Tensor) -> dict[str, Any] | None:
    """The mean of summed losses, and of how many tokens; None if there are none."""
    tokens = int(count.sum())
    if not tokens:
        return None
    mean = float(loss.sum()) / tokens
    return {"loss": mean, "perplexity": perplexity_of(mean), "tokens": tokens}


def _by_position(loss: Tensor, count: Tensor) -> list[dict[str, Any]]:
    """Mean losses over positions up to 1, 2, 4, 8, ... tokens of context."""
    found, begin = [], 0
    while begin < len(loss):
        end = min(max(1, 2 * begin), len(loss))
        tokens = int(count[begin:end].sum())
        if tokens:
            mean = float(loss[begin:end].sum()) / tokens
            found.append({"from": begin + 1, "to": end, "loss": mean, "tokens": tokens})
        begin = end
    return found


def _tables(
    found: list[list[Record]], contexts: Sequence[int], stride: int | None
) -> Iterator[Table]:
    """Perplexity and bits per byte, models down and contexts across."""
    how = "disjoint windows" if stride is None else f"windows sliding by {stride}"
    for unit, title in (("perplexity", "perplexity per token"), ("bits_per_byte", "bits per byte")):
        rows = [
            [group[0]["model"]["name"], *(f"{record['result'][unit]:.3f}" for record in group)]
            for group in found
        ]
        yield Table(f"{title} by context, {how}", ["model", *map(str, contexts)], rows)


def _lines(found: list[list[Record]]) -> Iterator[str]:
    """How much a context adds to the next shorter one."""
    for record in (record for group in found for record in group):
        name, context, note = record["model"]["name"], record["setting"]["context"], record["note"]
        shorter, more = note["shorter"], note["saw_more"]
        if shorter and not more:
            yield (
                f"{name}: {context} tokens of context are no more than {shorter}, since no "
                "document has as many"
            )
        elif shorter:
            tokens = record["result"]["tokens"]
            yield (
                f"{name}, context {context}: {more:,} of {tokens:,} tokens are predicted from "
                f"more than {shorter}"
            )


def _draw(found: list[list[Record]], path: Path) -> None:
    """Loss by position in the longest context of each model."""
    with figures.figure(path, figsize=(7, 4.5)) as axis:
        for group in found:
            longest = max(group, key=lambda record: record["setting"]["context"])
            rows = longest["result"]["by_position"]
            name = longest["model"]["name"]
            axis.plot([r["to"] for r in rows], [r["loss"] for r in rows], "o-", label=name)
        figures.count_tokens(axis)
        axis.set(xlabel="tokens of context, up to", ylabel="loss, nats per token")
        axis.grid(alpha=0.3)
        axis.legend()
