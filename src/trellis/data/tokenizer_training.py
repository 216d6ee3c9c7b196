"""Trains a byte-level BPE tokenizer on the sources that `prepare` reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from .documents import Piece, Skip
from .pieces import AFTER_NEWLINE_OR_BEFORE_SPACE, cut
from .sources import Meter, list_sources, no_documents, read_unit
from .tokenizer import END_OF_DOCUMENT, FILE_NAME, TextTokenizer

#: Every byte and the end of a document.
SMALLEST_VOCABULARY = 257


def train_tokenizer(
    sources: Sequence[str | Path],
    vocab_size: int,
    out: str | Path,
    *,
    text_field: str = "text",
    progress: Callable[[int, int], None] | None = None,
    skipped: Callable[[Skip], None] | None = None,
) -> TextTokenizer:
    """Trains with GPT-2's pre-tokenizer and writes `out`, a folder or a path that ends in .json.

    progress: called with the documents and the bytes of text read so far.
    skipped: called with each input that was left out.
    Raises FileExistsError if the file is there already, ValueError if `vocab_size` is too small or
    the sources have no text, and what `list_sources` raises.
    """
    path = Path(out)
    if path.suffix != ".json":
        path = path / FILE_NAME
    if path.exists():
        raise FileExistsError(f"{path} exists: remove it or choose another --out")
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size must be at least {SMALLEST_VOCABULARY} (256 bytes and {END_OF_DOCUMENT}); "
            f"got {vocab_size}"
        )
    listing = list_sources(sources)
    path.parent.mkdir(parents=True, exist_ok=True)
    documents = size = 0
    failures: list[Skip] = []

    def texts() -> Iterator[str]:
        nonlocal documents, size
        for unit in listing.units:
            for event in read_unit(unit, text_field, Meter()):
                if isinstance(event, Piece):
                    documents += event.last
                    size += event.size
                    # The library collects hundreds of texts at a time.
                    yield from cut(event.text, AFTER_NEWLINE_OR_BEFORE_SPACE, 1 << 15)
                    if progress is not None:
                        progress(documents, size)
                elif isinstance(event, Skip):
                    failures.append(event)
                    if skipped is not None:
                        skipped(event)

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts(), trainer)
    if documents == 0:
        raise ValueError(no_documents(sources, failures[:5], len(failures), dict(listing.ignored)))
    tokenizer = TextTokenizer(inner.to_str(), str(out))
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(inner.to_str(pretty=False))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    return tokenizer
