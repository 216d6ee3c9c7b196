"""Multi-query associative recall: pairs of keys and values, then keys whose values are asked.

A sequence of L tokens over a vocabulary of V begins with n pairs, k1 v1 ... kn vn: different keys
from [1, V/2) and different values from [V/2, V). Every key comes again at place 2n + 2 gap, where
its value is the label; the n gaps are drawn without replacement from the (L - 2n) / 2 there are,
gap i with a chance in proportion to (i + 1)^(a - 1), so that most keys come soon. All other places
hold 0, or random tokens, and have no label. So it is built in Zoology (Arora et al., 2023).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import checks
from ..models.loss import IGNORED
from ..models.modeling import TrellisForCausalLM

#: a: the smaller, the sooner keys come again.
POWER = 0.01
#: Streams of examples that share none of their randomness.
SPLITS = ("train", "validation", "test")
#: Examples are drawn so many at a time, so that one does not depend on how many are asked for.
BLOCK = 64


class Setting(NamedTuple):
    """Tokens of a sequence, and its pairs."""

    length: int
    pairs: int

    def check(self, vocab_size: int) -> None:
        """Raises ValueError where no such sequence exists."""
        checks.at_least("the length of a sequence", self.length, 1)
        checks.at_least("the number of pairs", self.pairs, 1)
        if vocab_size < 4 or vocab_size % 2:
            raise ValueError(f"vocab_size must be even and at least 4; got {vocab_size}")
        if self.pairs > vocab_size // 2 - 1:
            raise ValueError(
                f"a vocabulary of {vocab_size} has {vocab_size // 2 - 1} keys, which must be at "
                f"least the number of pairs; got {self.pairs} pairs"
            )
        if (self.length - 2 * self.pairs) // 2 < self.pairs:
            raise ValueError(
                f"{self.pairs} pairs and their queries take at least {4 * self.pairs} tokens; got "
                f"a length of {self.length}"
            )


class Examples(NamedTuple):
    """inputs [N, L]; labels [N, L]: the value at the place of each query, else IGNORED."""

    inputs: Tensor
    labels: Tensor

    def to(self, device: str) -> Examples:
        return Examples(self.inputs.to(device), self.labels.to(device))

    def sha256(self) -> str:
        """For a result to say what it was measured on."""
        digest = hashlib.sha256(str(tuple(self.inputs.shape)).encode())
        for part in self:
            digest.update(part.numpy().astype("<i8").tobytes())
        return digest.hexdigest()


def examples(
    setting: Setting,
    vocab_size: int,
    count: int,
    *,
    split: str,
    seed: int = 0,
    first: int = 0,
    random_non_queries: bool = True,
) -> Examples:
    """`count` examples from number `first` on. Each is set by the other arguments and its number.

    random_non_queries: places without a pair or a query hold random tokens, instead of 0.

    Raises:
        ValueError: there are no sequences of this setting.
    """
    setting.check(vocab_size)
    checks.at_least("count", count, 1)
    checks.at_least("first", first, 0)
    checks.at_least("seed", seed, 0)
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}; got {split!r}")
    begin, end = first // BLOCK, -(-(first + count) // BLOCK)
    blocks = [
        _block(setting, vocab_size, random_non_queries, split, seed, number)
        for number in range(begin, end)
    ]
    skipped = first - begin * BLOCK
    inputs, labels = (
        torch.from_numpy(np.concatenate(parts)[skipped : skipped + count]) for parts in zip(*blocks)
    )
    return Examples(inputs, labels)


# The last are kept: where batches are smaller, the next one begins inside. Only to be read.
@lru_cache(maxsize=16)
def _block(
    setting: Setting, vocab_size: int, random_non_queries: bool, split: str, seed: int, number: int
) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng([seed, SPLITS.index(split), *setting, vocab_size, number])
    length, pairs = setting
    half = vocab_size // 2
    keys = 1 + _sample(generator, np.ones(half - 1), pairs)
    values = half + _sample(generator, np.ones(half), pairs)
    weights = np.arange(1, (length - 2 * pairs) // 2 + 1) ** (POWER - 1)
    places = 2 * pairs + 2 * _sample(generator, weights, pairs)
    inputs = np.zeros((BLOCK, length), dtype=np.int64)
    labels = np.full((BLOCK, length), IGNORED, dtype=np.int64)
    inputs[:, 0 : 2 * pairs : 2] = keys
    inputs[:, 1 : 2 * pairs : 2] = values
    np.put_along_axis(inputs, places, keys, axis=1)
    np.put_along_axis(labels, places, values, axis=1)
    if random_non_queries:
        other = generator.integers(vocab_size, size=inputs.shape)
        inputs = np.where(inputs == 0, other, inputs)
    return inputs, labels


def _sample(generator: np.random.Generator, weights: np.ndarray, count: int) -> np.ndarray:
    """[BLOCK, count] indices drawn one after the other without replacement, by weight.

    Of independent exponential times, the first is i with a chance in proportion to its rate; so
    the order of their times is the order of such draws.
    """
    times = generator.standard_exponential((BLOCK, len(weights))) / weights
    first = np.argpartition(times, count - 1, axis=1)[:, :count]
    order = np.argsort(np.take_along_axis(times, first, axis=1), axis=1)
    return np.take_along_axis(first, order, axis=1)


#: One of our models, or a function from ids [B, T] to logits [B, T, V].
Answers = TrellisForCausalLM | Callable[[Tensor], Tensor]


def query_logits(model: Answers, inputs: Tensor, labels: Tensor) -> Tensor:
    """Logits [queries, V]. Our models compute them at the queries only."""
    asked = labels != IGNORED
    if isinstance(model, TrellisForCausalLM):
        hidden = model.model(inputs, use_cache=False).last_hidden_state
        return model.lm_head(hidden[asked])
    return model(inputs)[asked]


@torch.no_grad()
def accuracy(model: Answers, data: Examples, batch_tokens: int = 16384) -> float:
    """Share of the queries whose likeliest token, of the whole vocabulary, is their value."""
    rows = max(1, batch_tokens // data.inputs.shape[1])
    right = asked = 0
    for inputs, labels in zip(data.inputs.split(rows), data.labels.split(rows)):
        found = query_logits(model, inputs, labels).argmax(-1)
        right += int((found == labels[labels != IGNORED]).sum())
        asked += len(found)
    return right / asked
