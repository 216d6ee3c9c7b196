"""A count model of token pairs: what a model that learns must beat.

    p(b | a) = (count(a b) + strength p(b)) / (count(a) + strength)

p(b) is the share of b among the tokens that another follows. The strength is the one that does best
on the held-out text itself, so that the count model is at its best.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..data.batches import IGNORED, assemble, validation_windows

STRENGTHS = (0.3, 1, 3, 10, 30, 100, 300, 1000)
#: Pairs are counted in a table of vocabulary squared.
LARGEST_VOCABULARY = 8192
_READ = 1 << 22  # tokens at a time


def bigram_loss(train: Any, validation: Any, vocabulary: int, context: int, tokens: int) -> float:
    """Mean loss in nats on the windows that `validate` measures on, after counting all of `train`.

    Raises:
        ValueError: the vocabulary is too large to count pairs of.
    """
    if vocabulary > LARGEST_VOCABULARY:
        raise ValueError(
            f"pairs are counted for vocabularies of up to {LARGEST_VOCABULARY}; got {vocabulary}"
        )
    pairs, single = _count(train, vocabulary)
    share = (single + 0.5) / (single + 0.5).sum()
    before, after = _held_out(validation, context, tokens)
    counted, seen = pairs[before * vocabulary + after], single[before]
    losses = [
        -np.log((counted + strength * share[after]) / (seen + strength)).mean()
        for strength in STRENGTHS
    ]
    return float(min(losses))


def _count(stream: Any, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each pair occurs inside a document, and each token as the first of a pair."""
    pairs = np.zeros(vocabulary * vocabulary, dtype=np.int64)
    ends = np.asarray(stream.ends, dtype=np.int64)
    for start in range(0, stream.tokens - 1, _READ):
        ids = stream.read(start, min(start + _READ + 1, stream.tokens)).astype(np.int64)
        coded = ids[:-1] * vocabulary + ids[1:]
        inside = np.ones(len(coded), dtype=bool)
        last = ends[(ends > start) & (ends <= start + len(coded))] - start - 1
        inside[last] = False
        pairs += np.bincount(coded[inside], minlength=len(pairs))
    return pairs, pairs.reshape(vocabulary, vocabulary).sum(1)


def _held_out(stream: Any, context: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    context = min(context, stream.tokens - 1)
    starts = validation_windows(stream, context, tokens)
    batch = assemble([(stream, start) for start in starts], context)
    before, after = batch.input_ids.numpy().ravel(), batch.targets.numpy().ravel()
    known = after != IGNORED
    return before[known], after[known]
