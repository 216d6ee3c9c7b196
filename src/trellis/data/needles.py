"""Needles in haystacks, built as RULER builds its single needles (arXiv:2404.06654).

A needle is a value of a key, hidden in a long text; the prompt ends where the value must follow.
Every key and every value belongs to training or to the test by a hash of its text, so none is in
both. An item depends on the seed, the part, the variant, the length and its number alone.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import uuid
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from .haystack import Essay, Haystack, Noise
from .tokenizer import TextTokenizer

NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
PROMPT = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {key} mentioned in the provided text? "
    "The special magic {kind} for {key} mentioned in the provided text is"
)
#: Tokens of a length that are kept for the answer.
ANSWER_TOKENS = 128
#: RULER's: 40 from 0 to 100 per cent.
RANDOM_DEPTHS = tuple(round(100 * n / 39) for n in range(40))
PARTS = ("train", "test")
#: Keys and values that may be too long before a length is too short.
_DRAWS = 100


class Variant(NamedTuple):
    """What the needle is hidden in, and what its value is."""

    noise: bool
    kind: str


VARIANTS = {
    "passkey": Variant(True, "number"),  # S-NIAH-1
    "number": Variant(False, "number"),  # S-NIAH-2
    "uuid": Variant(False, "uuid"),  # S-NIAH-3
    "word": Variant(False, "word"),
}


class Item(NamedTuple):
    """A prompt, and the value that must follow."""

    prompt: str
    key: str
    value: str
    depth: float
    units: int  # lines or words of the haystack
    tokens: int  # of the prompt, with what stands before it


def part_of(text: str) -> str:
    """The part that a key or a value belongs to: a quarter is for training."""
    return "train" if hashlib.sha256(text.encode()).digest()[0] % 4 == 0 else "test"


def draw(rng: random.Random, kind: str, part: str) -> str:
    """A word (an adjective and a noun), a number of seven digits or a uuid of the part."""
    while True:
        if kind == "number":
            text = str(rng.randint(10**6, 10**7 - 1))
        elif kind == "uuid":
            text = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        else:
            adjectives, nouns = word_lists()
            text = f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
        if part_of(text) == part:
            return text


@functools.cache
def word_lists() -> tuple[list[str], list[str]]:
    """The adjectives and nouns that RULER takes.

    Raises ModuleNotFoundError if their package is not installed.
    """
    try:
        from wonderwords import Defaults, RandomWord
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "needles take their words from wonderwords: pip install 'trellis-memory[eval]'",
            name=error.name,
        ) from error
    lists = RandomWord(adjective=Defaults.ADJECTIVES, noun=Defaults.NOUNS)
    both = (lists.filter(include_categories=[name]) for name in ("adjective", "noun"))
    adjectives, nouns = (sorted(set(words)) for words in both)
    return adjectives, nouns


def words_sha256() -> str:
    """Of both lists: another version of their package may draw other keys."""
    return hashlib.sha256(json.dumps(word_lists()).encode()).hexdigest()


def check_variants(names: Sequence[str]) -> None:
    """Raises ValueError at a name that is none."""
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"variants must be among {', '.join(VARIANTS)}; got {name!r}")


class Needles:
    """Items of one part for one tokenizer and haystack.

    The haystack of a test item is the beginning of the text, as in RULER; that of a training item
    begins anywhere, so that it is not learned by heart.

    before: tokens that stand before a prompt, such as the one that ends documents; they count.
    """

    def __init__(
        self, tokenizer: TextTokenizer, haystack: Haystack, seed: int, part: str, before: int = 1
    ):
        if part not in PARTS:
            raise ValueError(f"part must be train or test; got {part!r}")
        self.tokenizer, self.haystack, self.seed, self.part = tokenizer, haystack, seed, part
        self.before = before
        self._costs: dict[str, int] = {}
        self._from_start = functools.cache(haystack.essay)

    def item(
        self, variant: str, length: int, index: int, depths: Sequence[int] | None = None
    ) -> Item:
        """Item number `index` of prompts that leave 128 of `length` tokens to the answer.

        depths: per cent, taken in turn. None draws one, as RULER does.

        Raises ValueError if the prompt does not fit even without a haystack.
        """
        noise, kind = VARIANTS[variant]
        rng = random.Random(f"{self.seed} {self.part} {variant} {length} {index}")
        key, value = self._draw(rng, variant, length)
        if depths is not None:
            depth: float = depths[index % len(depths)]
        else:
            # Any line of the noise, but one of 40 places in an essay.
            depth = 100 * rng.random() if noise else rng.choice(RANDOM_DEPTHS)
        # No unit takes less than a token, so there are enough of them.
        hay: Noise | Essay
        if noise:
            hay = Noise(length)
        elif self.part == "test":
            hay = self._from_start(length)
        else:
            hay = self.haystack.essay(length, rng.randrange(self.haystack.characters))
        needle = NEEDLE.format(kind=kind, key=key, value=value)

        def prompt(units: int) -> str:
            return PROMPT.format(kind=kind, key=key, context=hay.context(units, needle, depth))

        units, tokens = largest(
            lambda n: self.count(prompt(n)), self._sums(hay.units), length - ANSWER_TOKENS
        )
        return Item(prompt(units), key, value, depth, units, tokens)

    def _draw(self, rng: random.Random, variant: str, length: int) -> tuple[str, str]:
        """A key and its value. Where the length is just enough, long ones are drawn again."""
        kind = VARIANTS[variant].kind
        for _ in range(_DRAWS):
            key, value = draw(rng, "word", self.part), draw(rng, kind, self.part)
            while value == key:
                value = draw(rng, kind, self.part)
            needle = NEEDLE.format(kind=kind, key=key, value=value)
            tokens = self.count(PROMPT.format(kind=kind, key=key, context=f" {needle} "))
            if tokens + ANSWER_TOKENS <= length:
                return key, value
        raise ValueError(
            f"a length of {length} is too short for {variant}: a prompt has {tokens} tokens "
            f"without a haystack, and {ANSWER_TOKENS} are kept for the answer"
        )

    def count(self, prompt: str) -> int:
        """Tokens that a model reads: the prompt and what stands before it."""
        return self.before + len(self.tokenizer.encode(prompt))

    def _sums(self, units: Sequence[str]) -> list[int]:
        """About how many tokens the first n units take, for all n: each encoded by itself."""
        new = sorted(set(units) - self._costs.keys())
        for unit, ids in zip(new, self.tokenizer.encode_batch(new)):
            self._costs[unit] = len(ids)
        return list(accumulate((self._costs[unit] for unit in units), initial=0))


def largest(count: Callable[[int], int], sums: Sequence[int], limit: int) -> tuple[int, int]:
    """The largest n with count(n) <= limit, and its count; count(0) if even that is above.

    sums: about what the first n units add to count(0). Where it is nearly right, three or four
    counts are enough. However wrong it is, n is exact as long as count never falls, since its
    neighbour is counted too. Where count falls, as it may where units merge, n fits all the same,
    but a larger one may fit too.
    """
    fits, tokens = 0, count(0)
    if tokens > limit:
        return 0, tokens
    over = len(sums)
    n, counted = 0, tokens
    for turn in range(over):
        if over - fits <= 1:
            break
        n = bisect_right(sums, sums[n] + limit - counted) - 1
        if turn > 5:  # the sums mislead
            n = (fits + over) // 2
        n = min(max(n, fits + 1), over - 1)
        counted = count(n)
        if counted <= limit:
            fits, tokens = n, counted
        else:
            over = n
    return fits, tokens
