"""Places where a text can be cut without changing its tokens.

A tokenizer encodes one long text with one core. The pieces of a text can be encoded by all cores in
bounded memory, but must give the same tokens as the whole. For nearly every tokenizer that splits
text into words first, two kinds of places are safe: after a single newline that stands between a
character and a word, and before a single space between two letters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

#: After a newline without spaces around it, which would be tokens together with it. The next word
#: must not begin with the byte 0xC2: some spaces do, and vocabularies join them to a newline.
_NEWLINE = r"(?<=\S)\n(?=[^\W\x80-\xbf])"
AFTER_NEWLINE = re.compile(_NEWLINE)
#: After a newline or before a space, for texts with long lines.
AFTER_NEWLINE_OR_BEFORE_SPACE = re.compile(_NEWLINE + r"|(?<=[a-z])(?= [a-z])")

#: A token in which one of these is found reaches over such a place.
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
    """The last safe place in the last million characters of a text; its end if there is none."""
    for pattern in (AFTER_NEWLINE, AFTER_NEWLINE_OR_BEFORE_SPACE):
        for window in (1 << 12, 1 << 20):
            places = [m.end() for m in pattern.finditer(text, max(1, len(text) - window))]
            if places:
                return places[-1]
    return len(text)


def safe_place(
    encode: Callable[[list[str]], list[np.ndarray]], vocabulary: Sequence[bytes]
) -> re.Pattern[str] | None:
    """Where texts can be cut for a tokenizer; None if only whole texts give the right tokens.

    Two conditions must hold: no token of the vocabulary reaches over such a place, and a text that
    is cut at all of them gives the tokens of the whole. (A tokenizer that puts a space before every
    text does not pass.)
    """
    if any(_OVER_NEWLINE.search(token) for token in vocabulary):
        return None
    candidates = [AFTER_NEWLINE]
    if not any(_OVER_SPACE.search(token) for token in vocabulary):
        candidates.insert(0, AFTER_NEWLINE_OR_BEFORE_SPACE)
    whole = encode([_PROBE])[0]
    for place in candidates:
        if np.array_equal(np.concatenate(encode(list(cut(_PROBE, place, 0)))), whole):
            return place
    return None
