"""Documents of any source of text, for measuring on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ..data.sources import whole_texts


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
    for text in whole_texts(sources, text_field):
        if document_bytes is not None:
            text = text.encode()[:document_bytes].decode(errors="ignore")
        if text:
            found.append(text)
        if limit is not None and len(found) == limit:
            break
    if not found:
        raise ValueError(f"there is no text in {', '.join(sources)}")
    return found


def hash_of(texts: Sequence[str]) -> str:
    """sha256 of the documents, for a result to say what it was measured on."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
