"""Perplexity by context length and by position.

A document is the tokens of its text behind the token that texts start with. A window of L tokens
predicts its L next tokens, so that every token of a document is predicted once: with disjoint
windows from at most L tokens before it; with sliding windows, which move by `stride` and count only
their last `stride` predictions, from at least L - stride (where the document has as many).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..training.metrics import perplexity_of
from .scoring import BATCH_TOKENS, Progress, batches
from .subject import Subject

#: Tokens whose logits exist at a time.
LOGIT_TOKENS = 4096


class Text(NamedTuple):
    """One document: token ids with the starting token first, and the bytes that are predicted."""

    ids: list[int]
    size: int


def encode(subject: Subject, text: str) -> Text:
    """Without a starting token the first token of the text is not predicted."""
    ids = subject.tokenizer.encode(text).tolist()
    size = len(text.encode())
    if not subject.start and ids:
        size -= len(subject.tokenizer.decode(ids[:1]).encode())
    return Text([*subject.start, *ids], size)


class Window(NamedTuple):
    """ids[i + 1] is predicted from ids[: i + 1] for i from `first` on."""

    ids: list[int]
    first: int


def windows(text: Text, context: int, stride: int | None) -> Iterator[Window]:
    """Windows of `context` tokens and one more as the last target."""
    step = context if stride is None else stride
    done = 0  # predictions so far
    total = len(text.ids) - 1
    while done < total:
        stop = min(done + (context if done == 0 else step), total)
        begin = max(0, stop - context) if stride is not None else done
        yield Window(text.ids[begin : stop + 1], done - begin)
        done = stop


def check_stride(stride: int | None, contexts: Sequence[int]) -> None:
    """Raises ValueError at a stride that would leave tokens out."""
    if stride is not None and not 1 <= stride <= min(contexts):
        raise ValueError(
            f"--stride must be from 1 to the shortest context, {min(contexts)}; got {stride}"
        )


def saw_more(texts: Sequence[Text], context: int, stride: int | None, than: int) -> int:
    """How many tokens are predicted from more than so many before them."""
    cut = (window for text in texts for window in windows(text, context, stride))
    return sum(max(0, len(window.ids) - 1 - max(window.first, than)) for window in cut)


class Totals:
    """Sums of losses over positions: predictions made from exactly i + 1 tokens."""

    def __init__(self, context: int):
        self.loss = torch.zeros(context, dtype=torch.float64)
        self.count = torch.zeros(context, dtype=torch.long)

    def add(self, losses: Tensor, first: int) -> None:
        place = slice(first, first + len(losses))
        self.loss[place] += losses.double().cpu()
        self.count[place] += 1

    def result(self, size: int) -> dict[str, Any]:
        total, count = float(self.loss.sum()), int(self.count.sum())
        loss = total / count
        return {
            "loss": loss,
            "perplexity": perplexity_of(loss),
            "bits_per_byte": total / math.log(2) / size,
            "tokens": count,
            "bytes": size,
            "by_position": self.by_position(),
        }

    def by_position(self) -> list[dict[str, Any]]:
        """Means over positions up to 1, 2, 4, 8, ... tokens of context."""
        found, begin = [], 0
        while begin < len(self.loss):
            end = min(max(1, 2 * begin), len(self.loss))
            count = int(self.count[begin:end].sum())
            if count:
                mean = float(self.loss[begin:end].sum()) / count
                found.append({"from": begin + 1, "to": end, "loss": mean, "tokens": count})
            begin = end
        return found


def perplexity(
    subject: Subject,
    texts: Sequence[Text],
    context: int,
    *,
    stride: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = lambda done: None,
) -> dict[str, Any]:
    """Loss per token and per byte over windows of `context` tokens, and by position in them.

    Raises:
        ValueError: the model cannot read so much, or there is nothing to predict.
    """
    subject.check_context(context, f"a context of {context:,} tokens")
    check_stride(stride, [context])
    cut = [window for text in texts for window in windows(text, context, stride)]
    if not cut:
        raise ValueError("there is nothing to predict: the texts have no tokens")
    totals = Totals(context)
    for batch in batches([len(window.ids) for window in cut], batch_tokens):
        chosen = [cut[n] for n in batch]
        for window, losses in zip(chosen, token_losses(subject, [w.ids for w in chosen])):
            totals.add(losses[window.first :], window.first)
        progress(sum(len(window.ids) - 1 - window.first for window in chosen))
    return totals.result(sum(text.size for text in texts))


@torch.no_grad()
def token_losses(subject: Subject, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """-log p of every token of every row but its first, in nats.

    Our models read rows in segments, so that a row of any length takes the memory of one.
    """
    if not subject.ours:
        return [
            F.cross_entropy(logits.float(), torch.tensor(row[1:], device=logits.device),
                            reduction="none")
            for row, logits in zip(rows, subject.logits([row[:-1] for row in rows]))
        ]  # fmt: skip
    # Longest first, so that those that go on are always the first ones.
    order = sorted(range(len(rows)), key=lambda n: -len(rows[n]))
    size = max(1, LOGIT_TOKENS // len(rows))
    cache = subject.model.init_cache(len(rows))
    found: list[list[Tensor]] = [[torch.empty(0, device=subject.device)] for _ in rows]
    for begin in range(0, len(rows[order[0]]) - 1, size):
        going = [n for n in order if len(rows[n]) > begin + 1]
        if len(going) < cache.batch_size:
            cache = cache.select(slice(0, len(going)))
        parts = [list(rows[n][begin : begin + size + 1]) for n in going]
        logits = subject.go_on([part[:-1] for part in parts], cache)
        for n, part, one in zip(going, parts, logits):
            target = torch.tensor(part[1:], device=one.device)
            found[n].append(F.cross_entropy(one.float(), target, reduction="none"))
    return [torch.cat(losses) for losses in found]
