"""The text that a needle is hidden in: RULER's noise, or the words of any text.

Both are a run of units (lines of noise, words of an essay), cut to the first n. A needle at depth d
per cent stands before line int(n d / 100), or before sentence int(s d / 100) of s sentences.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, islice

from .sources import whole_texts

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
#: Where a sentence ends and another begins.
SENTENCE_BREAK = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"])")
_WORD = re.compile(r"\S+")


class Noise:
    """One line, repeated."""

    def __init__(self, lines: int):
        #: What each unit adds to the text.
        self.units: Sequence[str] = [NOISE + "\n"] * lines

    def context(self, n: int, needle: str, depth: float) -> str:
        """n lines with the needle among them."""
        lines = [NOISE] * n
        lines.insert(int(n * depth / 100), needle)
        return "\n".join(lines)


class Essay:
    """Words of a text."""

    def __init__(self, words: Sequence[str]):
        self.words = words
        #: What each unit adds to the text.
        self.units: Sequence[str] = [" " + word for word in words]
        #: The words that begin a sentence, but for the first: SENTENCE_BREAK on single words.
        self.begins = [
            n for n in range(1, len(words))
            if words[n - 1][-1] in ".!?" and (words[n][0] == '"' or "A" <= words[n][0] <= "Z")
        ]  # fmt: skip

    def context(self, n: int, needle: str, depth: float) -> str:
        """The first n words with the needle between two of their sentences."""
        sentences = bisect_left(self.begins, n) + 1
        before = int(sentences * depth / 100)
        bounds = [0, *self.begins[: sentences - 1], n]
        place = bounds[before]
        # As RULER joins: at depth 0 and 100 an empty piece leaves its space.
        return " ".join([" ".join(self.words[:place]), needle, " ".join(self.words[place:n])])


class Haystack:
    """Documents as one long run of words, which begins again where it ends."""

    def __init__(self, documents: Sequence[str]):
        """Raises ValueError if there is no word in them."""
        self.documents = [text for text in documents if _WORD.search(text)]
        if not self.documents:
            raise ValueError("the haystack has no words")
        self.ends = list(accumulate(len(text) for text in self.documents))

    @property
    def characters(self) -> int:
        return self.ends[-1]

    def essay(self, count: int, start: int | None = None) -> Essay:
        """So many words from the beginning, or from the first sentence after character `start`."""
        if start is None:
            return Essay(self._words(count, 0, 0))
        number = bisect_right(self.ends, start)
        offset = start - (self.ends[number - 1] if number else 0)
        text = self.documents[number]
        found = SENTENCE_BREAK.search(text, offset) if offset else None
        if found:
            return Essay(self._words(count, number, found.end()))
        # The rest of the document has no other sentence: at its beginning it is one itself.
        following = (number + 1) % len(self.documents) if offset else number
        return Essay(self._words(count, following, 0))

    def _words(self, count: int, number: int, offset: int) -> list[str]:
        words: list[str] = []
        while len(words) < count:
            found = _WORD.finditer(self.documents[number], offset)
            words += islice((match[0] for match in found), count - len(words))
            number, offset = (number + 1) % len(self.documents), 0
        return words


def read_haystack(sources: Sequence[str], words: int | None = None) -> Haystack:
    """Of files, folders, archives, data sets: all, or the documents up to so many words.

    Raises what `list_sources` raises, and ValueError if there is nothing to read.
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
