"""Places where a text may be cut without changing its tokens.

A tokenizer works on one long text with one core. Cut into pieces, a text uses all cores and bounded
memory; but the pieces must give the same tokens as the whole. Two kinds of place are safe for
nearly every tokenizer that splits text into words before it merges: behind a single newline between
non-space and a word, and before a single space between two letters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np

#: Behind a newline. Neighbours that are spaces would belong to the same run of spaces. The words
#: left out begin with the byte 0xC2, as do the spaces that some vocabularies join to a newline.
_NEWLINE = r"(?<=\S)\n(?=[^\W\x80-\xbf])"
AFTER_NEWLINE = re.compile(_NEWLINE)
#: Behind a newline, or before a space: texts with long lines have few newlines.
AFTER_NEWLINE_OR_BEFORE_SPACE = re.compile(_NEWLINE + r"|(?<=[a-z])(?= [a-z])")

#: A token that has one of these inside reaches over such a place.
_OVER_NEWLINE = re.compile(rb"\n[^\s\xc2]")
_OVER_SPACE = re.compile(rb"[a-z] ")

_PROBE = """The quick brown fox (it's said), jumps over 12 lazy dogs.
Line two ends with a comma,
and 34567 numbers... begin lines
2nd of them; "quoted"
Words we'll split don't
split, naïve café
Ünïcode ЖУК слово
日本語 の テキスト
emoji 😀
a
b
  indented line	tab
def f(x): return x == 3
_private name
end of it"""


def cut(text: str, place: re.Pattern[str], size: int) -> Iterator[str]:
    """Pieces of at least `size` characters (the last may be shorter), cut where `place` matches."""
    start = 0
    while len(text) - start > size:
        found = place.search(text, start + max(size, 1))
        if found is None:
            break
        yield text[start : found.end()]
        start = found.end()
    yield text[start:] if start else text


def last_cut(text: str) -> int:
    """The last safe place of a text; its length if its last million characters have none."""
    for pattern in (AFTER_NEWLINE, AFTER_NEWLINE_OR_BEFORE_SPACE):
        for window in (1 << 12, 1 << 20):
            places = [m.end() for m in pattern.finditer(text, max(1, len(text) - window))]
            if places:
                return places[-1]
    return len(text)


def safe_place(
    encode: Callable[[list[str]], list[np.ndarray]], vocabulary: Iterable[bytes]
) -> re.Pattern[str] | None:
    """Where a tokenizer's texts may be cut; None if only whole texts give the right tokens.

    Two conditions: no token of the vocabulary reaches over such a place, and a text cut at each of
    them has the tokens of the whole (a tokenizer that puts a space before every text fails here).
    """
    over_newline = over_space = False
    for token in vocabulary:
        over_newline = over_newline or _OVER_NEWLINE.search(token) is not None
        over_space = over_space or _OVER_SPACE.search(token) is not None
    candidates = []
    if not over_newline:
        candidates = (
            [AFTER_NEWLINE] if over_space else [AFTER_NEWLINE_OR_BEFORE_SPACE, AFTER_NEWLINE]
        )
    whole = encode([_PROBE])[0]
    for place in candidates:
        if np.array_equal(np.concatenate(encode(list(cut(_PROBE, place, 0)))), whole):
            return place
    return None
