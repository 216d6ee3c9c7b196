"""Documents of any source of text, for measuring on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from ..data.documents import Piece, Skip
from ..data.sources import Meter, list_sources, read_unit


def documents(
    sources: Sequence[str],
    *,
    limit: int | None = None,
    document_bytes: int | None = None,
    text_field: str = "text",
) -> list[str]:
    """The first `limit` documents, each cut to its first `document_bytes` bytes.

    Raises:
        ValueError: there is none, or one cannot be read.
    """
    found: list[str] = []
    for text in _whole(sources, text_field):
        if document_bytes is not None:
            text = text.encode()[:document_bytes].decode(errors="ignore")
        if text:
            found.append(text)
        if limit is not None and len(found) == limit:
            break
    if not found:
        raise ValueError(f"there is no text in {', '.join(sources)}")
    return found


def _whole(sources: Sequence[str], text_field: str) -> Iterator[str]:
    for unit in list_sources(sources).units:
        parts: list[str] = []
        for event in read_unit(unit, text_field, Meter()):
            if isinstance(event, Skip):
                raise ValueError(f"{event.name} cannot be measured on: {event.reason}")
            if isinstance(event, Piece):
                parts.append(event.text)
                if event.last:
                    yield "".join(parts)
                    parts = []


def hash_of(texts: Sequence[str]) -> str:
    """sha256 of the documents, for a result to say what it was measured on."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
