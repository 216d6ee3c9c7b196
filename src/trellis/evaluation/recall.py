"""Recall from a text: the answer stands in it, and is to be written after a query.

Prompts, greedy completions and the score are those of lm-eval's tasks squad_completion, swde and
fda: the whole text without the white space around it, at most 48 tokens up to a line's end, right
if the value occurs in them in whatever case.

Cut contexts follow "Just read twice" (Arora et al., 2024), whose 1,000 tokens less 50 for the
answer are 950: the document is cut to so many tokens around the answer, and what is asked for comes
after them: " Key:" for SWDE and FDA, behind a full stop; the published query for SQuAD. Three
things differ from that code. The window is centred on the first place of the answer; there it may
be that of the key, and leave the answer outside. It has its full length also at the end of a
document. And the query is taken off before the document is cut, not after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..data.tokenizer import TextTokenizer
from .recall_data import Item
from .scoring import BATCH_TOKENS, Progress, complete
from .subject import Subject

MAX_TOKENS = 48
STOP = "\n"


def contains(output: str, answers: Sequence[str]) -> bool:
    """Whether one of the answers occurs in the output, in whatever case."""
    return any(re.search(re.escape(answer), output, re.IGNORECASE) for answer in answers)


def window(length: int, begin: int, end: int, size: int) -> tuple[int, int]:
    """Of `length` tokens, `size` with begin:end in their middle, moved to stay inside."""
    start = (begin + end) // 2 - size // 2
    start = max(0, min(start, length - size))
    return start, min(length, start + size)


def cut_prompt(item: Item, tokenizer: TextTokenizer, size: int) -> list[int]:
    """Token ids of `size` tokens of the document, or all of a shorter one, and of the query.

    A document without the answer keeps its end.

    Raises:
        ValueError: so few tokens cannot hold the answer, or the query cannot be told.
    """
    # Not decoded and encoded again, which could give more tokens than were cut.
    kept = _cut_document(item, tokenizer, size)
    if item.key is None:
        return [*kept, *tokenizer.encode(item.query.rstrip()).tolist()]
    while kept and tokenizer.decode(kept[-1:]).isspace():
        kept.pop()
    stop = "" if tokenizer.decode(kept).endswith(".") else "."
    asked = f"{stop} {item.key[0].upper()}{item.key[1:]}:"
    return [*kept, *tokenizer.encode(asked).tolist()]


def _cut_document(item: Item, tokenizer: TextTokenizer, size: int) -> list[int]:
    text = item.document
    encoded = tokenizer.inner.encode(text, add_special_tokens=False)
    ids = encoded.ids
    if len(ids) <= size:
        return ids
    if item.key is None and not item.query:
        raise ValueError(
            f"{item.where}: the text of {len(ids):,} tokens cannot be cut to {size:,}: it has no "
            "field 'context' with the passage that it begins with"
        )
    # A document without the answer is cut as if the answer stood behind it.
    begin, end = _tokens_of(encoded.offsets, item.span or (len(text), len(text)))
    if end - begin > size:
        raise ValueError(
            f"{item.where}: the answer has {end - begin:,} tokens, which do not fit into {size:,}: "
            "give more to --context-tokens"
        )
    start, stop = window(len(ids), begin, end, size)
    return ids[start:stop]


def _tokens_of(offsets: Sequence[tuple[int, int]], span: tuple[int, int]) -> tuple[int, int]:
    """The tokens that hold characters of a span; none, at its place, if the tokenizer drops it."""
    first, last = span
    held = [n for n, (begin, end) in enumerate(offsets) if begin < last and end > first]
    if held:
        return held[0], held[-1] + 1
    place = sum(end <= first for _, end in offsets)
    return place, place


def encode(subject: Subject, items: Sequence[Item], context_tokens: int | None) -> list[list[int]]:
    """Token ids of the prompts: whole texts, or documents cut to `context_tokens`.

    Before each stands what the tokenizer puts before every text, as in lm-eval.

    Raises:
        ValueError: the model cannot read one of them, or it cannot be cut.
    """
    tokenizer = subject.tokenizer
    if context_tokens is None:
        encoded = tokenizer.encode_batch([item.prompt for item in items])
        prompts = [[*subject.prefix, *ids.tolist()] for ids in encoded]
    else:
        prompts = [
            [*subject.prefix, *cut_prompt(item, tokenizer, context_tokens)] for item in items
        ]
    limit = subject.max_context
    for item, prompt in zip(items, prompts):
        tokens = len(prompt) + MAX_TOKENS
        if limit is not None and tokens > limit:
            raise ValueError(
                f"{item.where}: the prompt with {MAX_TOKENS} tokens of answer has {tokens:,}, but "
                f"{subject.name} reads at most {limit:,}: cut contexts with --context-tokens"
            )
    return prompts


def measure(
    subject: Subject,
    items: Sequence[Item],
    prompts: Sequence[Sequence[int]],
    *,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = lambda done: None,
) -> dict[str, Any]:
    """How many items a model completes with their answer, and what it wrote for each."""
    outputs = complete(
        subject, prompts, max_tokens=MAX_TOKENS, stop=STOP,
        batch_tokens=batch_tokens, progress=progress,
    )  # fmt: skip
    right = [contains(output, item.answers) for output, item in zip(outputs, items)]
    return {
        "accuracy": sum(right) / len(right),
        "right": sum(right),
        "items": len(right),
        # Nobody can copy these; they count all the same.
        "answer_not_in_document": sum(item.span is None for item in items),
        "outputs": [
            {"item": number, "answers": list(item.answers), "output": output, "right": hit}
            for number, (item, output, hit) in enumerate(zip(items, outputs, right), 1)
        ],
    }
