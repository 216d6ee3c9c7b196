"""Trains a byte-level BPE tokenizer on the sources that `prepare` reads."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ..files import write_whole
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
    ignored: Callable[[Counter[str]], None] | None = None,
) -> TextTokenizer:
    """Trains with GPT-2's pre-tokenizer and writes `out`, a folder or a path that ends in .json.

    progress: called with the documents and the bytes of text read so far.
    skipped: called with each input that was left out.
    ignored: called at the end with the number of files of each kind that is not read.
    Raises FileExistsError if the file is there already, another OSError if it cannot be written,
    ValueError if `vocab_size` is too small or the sources have no text, and what `list_sources`
    raises.
    """
    path = Path(out)
    if path.suffix != ".json":
        path = path / FILE_NAME
    _check_output(path)
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size must be at least {SMALLEST_VOCABULARY} (256 bytes and {END_OF_DOCUMENT}); "
            f"got {vocab_size}"
        )
    listing = list_sources(sources)
    documents = size = failures = 0
    first_failures: list[Skip] = []
    left_out = listing.ignored.copy()

    def texts() -> Iterator[str]:
        nonlocal documents, size, failures
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
                    failures += 1
                    if failures <= 5:
                        first_failures.append(event)
                    if skipped is not None:
                        skipped(event)
                else:
                    left_out[event.suffix] += 1

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
        raise ValueError(no_documents(sources, first_failures, failures, left_out))
    if ignored is not None:
        ignored(left_out)
    tokenizer = TextTokenizer(inner.to_str(), str(out))
    _check_output(path)  # reading took its time
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, inner.to_str(pretty=False).encode())
    return tokenizer


def _check_output(path: Path) -> None:
    """Raises FileExistsError if there is such a file, OSError if none can be made."""
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} exists: remove it or choose another --out")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise NotADirectoryError(f"{path} cannot be written: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written: no permission to write to {folder}")
