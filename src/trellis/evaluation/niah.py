"""Single needles in a haystack: how often a model says the value that a long text hides.

Items are built in `trellis.data.needles`. Decoding is greedy, and an answer is right if the value
occurs in it, as in RULER.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..data.needles import ANSWER_TOKENS, Needles
from .scoring import BATCH_TOKENS, Progress, complete
from .subject import Subject

#: Prompts whose tokens exist at a time hold about as many.
_PROMPT_TOKENS = 2**20
_CONTROL = re.compile(r"[\x00-\x1f]")


def matches(text: str, value: str) -> bool:
    """RULER's string_match_all for one value."""
    return value.lower() in _CONTROL.sub("\n", text.strip()).strip().lower()


def retrieve(
    subject: Subject,
    needles: Needles,
    variant: str,
    length: int,
    items: int,
    *,
    depths: Sequence[int] | None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = lambda done: None,
) -> dict[str, Any]:
    """The share of right answers among the first `items`, by depth, and every answer.

    depths: taken in turn; None draws one for each item.

    Raises:
        ValueError: the model cannot read so much, or the length is too short for the prompt.
    """
    check_length(subject, length)
    digest = hashlib.sha256()
    answers: list[dict[str, Any]] = []
    size = max(1, _PROMPT_TOKENS // length)
    for first in range(0, items, size):
        numbers = range(first, min(first + size, items))
        built = [needles.item(variant, length, index, depths) for index in numbers]
        texts = complete(
            subject,
            [[*subject.start, *subject.tokenizer.encode(item.prompt).tolist()] for item in built],
            max_tokens=ANSWER_TOKENS,
            enough=_answered([item.value for item in built]),
            batch_tokens=batch_tokens,
            progress=progress,
        )
        for item, text in zip(built, texts):
            digest.update(item.prompt.encode())
            answers.append({
                "correct": matches(text, item.value),
                "depth": item.depth,
                "key": item.key,
                "value": item.value,
                "answer": text,
                "units": item.units,
                "tokens": item.tokens,
            })  # fmt: skip
    return {
        "accuracy": sum(answer["correct"] for answer in answers) / len(answers),
        "by_depth": by_depth(answers, exact=depths is not None),
        "prompts_sha256": digest.hexdigest(),
        "items": answers,
    }


def _answered(values: Sequence[str]) -> Callable[[int, str], bool]:
    """Whether a value was said: what is written later cannot undo it."""
    return lambda number, text: matches(text, values[number])


def check_length(subject: Subject, length: int) -> None:
    """Raises ValueError if the model cannot read so much."""
    subject.check_context(length, "a prompt with its answer")


def by_depth(answers: Sequence[dict[str, Any]], exact: bool) -> list[dict[str, Any]]:
    """Right answers and items at every depth, or near every tenth of the text."""
    found: dict[float, list[bool]] = {}
    for answer in answers:
        # Halves go up: round() takes them to even tenths.
        depth = answer["depth"] if exact else 10 * int(answer["depth"] / 10 + 0.5)
        found.setdefault(depth, []).append(answer["correct"])
    return [
        {"depth": depth, "correct": sum(found[depth]), "items": len(found[depth])}
        for depth in sorted(found)
    ]
