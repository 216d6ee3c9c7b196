"""Needle-in-a-haystack prompts, built as RULER builds its single needles (arXiv:2404.06654).

A needle is a sentence like "One of the special magic numbers for brave-fox is: 4821973.", hidden in
a long text, the haystack. The prompt ends with a question for the key (brave-fox), and the value
(4821973) must follow. A hash of its text assigns every key and value to training or to the test, so
none is in both. An item depends only on the seed, the part, the variant, the length and its number.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import re
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

from .. import checks
from ..files import whole_file
from .compression import optional
from .sources import whole_texts
from .tokenizer import TextTokenizer, load_tokenizer

NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
PROMPT = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {key} mentioned in the provided text? "
    "The special magic {kind} for {key} mentioned in the provided text is"
)
#: The last sentence of PROMPT, which brief items ask with.
QUESTION = PROMPT[PROMPT.rindex("The special magic") :]
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
#: How many tokens of a prompt's length are reserved for the answer.
ANSWER_TOKENS = 128
#: RULER's depths for essays: 40 of them, from 0 to 100 per cent.
RANDOM_DEPTHS = tuple(round(100 * n / 39) for n in range(40))
PARTS = ("train", "test")
#: The space between two sentences.
SENTENCE_BREAK = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"])")
_WORD = re.compile(r"\S+")
#: The most words between needle and question in a brief item.
BRIEF_WORDS = 24
#: How many keys and values are tried before a length is called too short for a prompt.
_DRAWS = 100


class Noise:
    """A haystack of one line, repeated. Its units are lines.

    A needle at a depth of d per cent stands before line int(n d / 100) of n lines.
    """

    def __init__(self, lines: int):
        #: The text that each unit adds.
        self.units: Sequence[str] = [NOISE + "\n"] * lines

    def context(self, n: int, needle: str, depth: float) -> str:
        """The first n lines with the needle among them."""
        lines = [NOISE] * n
        lines.insert(int(n * depth / 100), needle)
        return "\n".join(lines)


class Essay:
    """A haystack of words from a text. Its units are words.

    A needle at a depth of d per cent stands before sentence int(s d / 100) of s sentences.
    """

    def __init__(self, words: Sequence[str]):
        self.words = words
        #: The text that each unit adds.
        self.units: Sequence[str] = [" " + word for word in words]
        #: The words that begin a sentence, except the first: SENTENCE_BREAK applied to words.
        self.begins = [
            n for n in range(1, len(words))
            if words[n - 1][-1] in ".!?" and (words[n][0] == '"' or "A" <= words[n][0] <= "Z")
        ]  # fmt: skip

    def context(self, n: int, needle: str, depth: float) -> str:
        """The first n words with the needle between two of their sentences."""
        sentences = bisect_left(self.begins, n) + 1
        bounds = [0, *self.begins[: sentences - 1], n]
        place = bounds[int(sentences * depth / 100)]
        # RULER joins the pieces like this: at depths 0 and 100 an empty piece leaves its space.
        return " ".join([" ".join(self.words[:place]), needle, " ".join(self.words[place:n])])


class Haystack:
    """Documents as one long run of words that starts over at its end."""

    def __init__(self, documents: Sequence[str]):
        """Raises ValueError if the documents have no words."""
        self.documents = [text for text in documents if _WORD.search(text)]
        if not self.documents:
            raise ValueError("the haystack has no words")
        self.ends = list(accumulate(len(text) for text in self.documents))

    @property
    def characters(self) -> int:
        return self.ends[-1]

    def essay(self, count: int, start: int = 0) -> Essay:
        """`count` words from the first sentence on that begins at character `start` or later."""
        words: list[str] = []
        number = bisect_right(self.ends, start)
        offset = start - (self.ends[number - 1] if number else 0)
        if offset:  # the first character of a document begins a sentence
            found = SENTENCE_BREAK.search(self.documents[number], offset)
            offset = found.end() if found else len(self.documents[number])
        while len(words) < count:
            matches = _WORD.finditer(self.documents[number], offset)
            words += islice((match[0] for match in matches), count - len(words))
            number, offset = (number + 1) % len(self.documents), 0
        return Essay(words)


def read_haystack(sources: Sequence[str], words: int | None = None) -> Haystack:
    """The haystack of some sources (see `list_sources`).

    words: reading stops after the document that completes this many words; None reads everything.

    Raises what `list_sources` raises, and ValueError if there are no words.
    """
    found, count = [], 0
    for text in whole_texts(sources):
        found.append(text)
        if words is not None:
            count += sum(1 for _ in islice(_WORD.finditer(text), words - count))
            if count >= words:
                break
    try:
        return Haystack(found)
    except ValueError as error:
        raise ValueError(f"{error}: {', '.join(map(str, sources))}") from error


class Variant(NamedTuple):
    """A kind of item: whether the haystack is noise (else an essay), and the kind of value."""

    noise: bool
    kind: str


VARIANTS = {
    "passkey": Variant(True, "number"),  # S-NIAH-1
    "number": Variant(False, "number"),  # S-NIAH-2
    "uuid": Variant(False, "uuid"),  # S-NIAH-3
    "word": Variant(False, "word"),
}


class Item(NamedTuple):
    """A prompt, and the value that must follow it."""

    prompt: str
    key: str
    value: str
    depth: float  # per cent
    units: int  # lines or words of the haystack
    tokens: int  # tokens of the prompt and of what stands before it


def check_variants(names: Sequence[str]) -> None:
    """Raises ValueError if a name is not one of VARIANTS."""
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"variants must be among {', '.join(VARIANTS)}; got {name!r}")


def part_of(text: str) -> str:
    """The part that a key or value belongs to: a quarter of them is for training."""
    return "train" if hashlib.sha256(text.encode()).digest()[0] % 4 == 0 else "test"


def draw(rng: random.Random, kind: str, part: str) -> str:
    """A word (adjective-noun), a number of seven digits or a uuid that belongs to `part`."""
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
    """The adjectives and nouns that RULER uses, from the package wonderwords.

    Raises ModuleNotFoundError if that package is not installed.
    """
    package = optional("wonderwords", "drawing the words of needles", extra="eval")
    words = package.Defaults
    lists = package.RandomWord(adjective=words.ADJECTIVES, noun=words.NOUNS)
    adjectives = lists.filter(include_categories=["adjective"])
    return sorted(set(adjectives)), sorted(set(lists.filter(include_categories=["noun"])))


def words_sha256() -> str:
    """A hash of both word lists, since another version of wonderwords gives other keys."""
    return hashlib.sha256(json.dumps(word_lists()).encode()).hexdigest()


class Needles:
    """The items of one part ("train" or "test") for one tokenizer and haystack.

    The haystack of a test item is the beginning of the text, as in RULER. That of a training item
    begins at a random sentence, so that a model cannot learn the text by heart.

    before: how many tokens the model reads before the prompt, such as one that ends documents. They
        count towards an item's length.
    """

    def __init__(
        self, tokenizer: TextTokenizer, haystack: Haystack, seed: int, part: str, before: int = 1
    ):
        if part not in PARTS:
            raise ValueError(f"part must be train or test; got {part!r}")
        self.tokenizer, self.haystack, self.seed, self.part = tokenizer, haystack, seed, part
        self.before = before
        self._costs: dict[str, int] = {}  # tokens of each unit
        self._from_start = functools.cache(haystack.essay)

    def item(
        self, variant: str, length: int, index: int, depths: Sequence[int] | None = None
    ) -> Item:
        """Item number `index`, whose prompt and 128 tokens for the answer fill `length` tokens.

        depths: depths in per cent that the items take in turn; None draws one, as RULER does.

        Raises ValueError if the prompt is too long even without a haystack.
        """
        noise, kind = VARIANTS[variant]
        rng = random.Random(f"{self.seed} {self.part} {variant} {length} {index}")
        key, value = self._draw(rng, variant, length)
        if depths is not None:
            depth: float = depths[index % len(depths)]
        else:  # any line of noise, but only one of 40 places in an essay
            depth = 100 * rng.random() if noise else rng.choice(RANDOM_DEPTHS)
        # `length` units are always enough, since each takes at least one token.
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

    def brief(self, variant: str, index: int) -> str:
        """A needle, a few words, and the question with its answer, twice.

        The second answer can be copied from the first, after the same words, which is what a model
        learns first; the first has to be copied from the needle.
        """
        kind = VARIANTS[variant].kind
        rng = random.Random(f"{self.seed} {self.part} {variant} brief {index}")
        key, value = draw(rng, "word", self.part), draw(rng, kind, self.part)
        while value == key:
            value = draw(rng, kind, self.part)
        told = NEEDLE.format(kind=kind, key=key, value=value)
        asked = f"{QUESTION.format(kind=kind, key=key)} {value}."
        count = rng.randrange(BRIEF_WORDS + 1)
        words = self.haystack.essay(count, rng.randrange(self.haystack.characters)).words
        return " ".join([told, *words, asked, asked])

    def _draw(self, rng: random.Random, variant: str, length: int) -> tuple[str, str]:
        """A key and its value. If they are too long for a prompt of `length`, others are drawn."""
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
        """How many tokens a model reads: those of the prompt and those before it."""
        return self.before + len(self.tokenizer.encode(prompt))

    def _sums(self, units: Sequence[str]) -> list[int]:
        """An estimate of the tokens of the first n units, for every n: each is encoded alone."""
        new = sorted(set(units) - self._costs.keys())
        for unit, ids in zip(new, self.tokenizer.encode_batch(new)):
            self._costs[unit] = len(ids)
        return list(accumulate((self._costs[unit] for unit in units), initial=0))


def largest(count: Callable[[int], int], sums: Sequence[int], limit: int) -> tuple[int, int]:
    """The largest n with count(n) <= limit, and count(n); (0, count(0)) if none is small enough.

    sums: estimates of count(n) - count(0), one for each n. A good estimate needs three or four
    calls of `count`. However bad the estimate is, n is exact as long as `count` never falls,
    because n + 1 is counted too. Where it falls, as it may when tokens merge, count(n) is within
    the limit, but a larger n may be as well.
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
        if turn > 5:  # the estimates mislead: halve the range instead
            n = (fits + over) // 2
        n = min(max(n, fits + 1), over - 1)
        counted = count(n)
        if counted <= limit:
            fits, tokens = n, counted
        else:
            over = n
    return fits, tokens


def write_needles(
    out: Path,
    variants: Sequence[str],
    lengths: Sequence[int],
    items: int,
    haystack: Sequence[str],
    *,
    tokenizer: str = "bytes",
    brief: float = 0.0,
    seed: int = 0,
    force: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> int:
    """Writes training items with their answers as jsonl, and returns how many bytes that took.

    brief: the share of items that are a needle, at most BRIEF_WORDS words and the question with its
        answer, twice. A small model learns from them to copy, before it has to do so from afar.

    Variant, length and depth are drawn for each item, and do not depend on how many items there
    are: a longer file begins with the lines of a shorter one.

    Raises FileExistsError if `out` exists and `force` is not set; ValueError if it is a folder or
    an argument is out of range; what `read_haystack` and `load_tokenizer` raise.
    """
    check_variants(variants)
    checks.share("brief", brief)
    if out.is_dir():
        raise ValueError(f"--out must be a file; {out} is a folder")
    if out.exists() and not force:
        raise FileExistsError(f"{out} exists: give --out a name that is free, or --force")
    made = Needles(load_tokenizer(tokenizer), read_haystack(haystack), seed, "train")
    for variant in variants:
        made.item(variant, min(lengths), 0)  # raises now, not after hours, if that is too short
    with whole_file(out) as file:
        for index in range(items):
            rng = random.Random(f"{seed} {index}")
            variant, length = rng.choice(list(variants)), rng.choice(list(lengths))
            if rng.random() < brief:
                text = made.brief(variant, index)
            else:
                item = made.item(variant, length, index)
                text = f"{item.prompt} {item.value}."
            line = json.dumps({"text": text})
            file.write(line.encode() + b"\n")
            progress()
        return file.tell()
