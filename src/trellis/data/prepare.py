"""Text to a corpus on disk: `prepare_corpus` reads, tokenizes and writes in one bounded stream.

A thread reads and decompresses; the caller's thread tokenizes (with all cores) and writes. The
output grows in `DIR.partial` and becomes `DIR` in one step at the end. After an interruption the
same call goes on (`resume.py`) and ends with the bytes of a run without one.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import trellis

from ..files import sha256_of, sync
from .documents import Event, Piece, Skip
from .resume import AppendedFile, ResumeState, SplitWriter, run_arguments, unfinished_folder
from .shards import PROGRESS_FILE, Corpus, TokenStream, open_corpus, write_manifest
from .shuffle import mix
from .sources import LeftOut, Listing, Meter, list_sources, read_unit
from .tokenizer import TextTokenizer, load_tokenizer

SKIPPED_FILE = "skipped.jsonl"
#: How much text, and how many events, are read, tokenized and written together.
BATCH_BYTES = 4 << 20
BATCH_EVENTS = 10_000
#: How often the progress is recorded.
CHECKPOINT_SECONDS = 1.0

T = TypeVar("T")


@dataclass
class Progress:
    """How far a run has come, for display."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    source_bytes: int = 0
    source_total: int | None = None  # None if it is not known
    skipped: int = 0
    resumed: bool = False


def prepare_corpus(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path = "bytes",
    validation: float = 0.01,
    seed: int = 0,
    text_field: str = "text",
    shard_tokens: int = 1 << 27,
    max_documents: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    skipped: Callable[[Skip], None] | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Corpus:
    """Makes the corpus `out` from sources (see `list_sources`), or goes on with an interrupted run.

    validation: the share of documents that go to the validation split, chosen by `seed`. If none is
        chosen, the validation split is the end of the last training document.
    max_documents: reading stops after this many documents.
    progress: called after each batch. skipped: called with each input that cannot be read.

    Raises FileExistsError if `out` exists; ValueError if an argument is out of range, if no
    document was found, or if an interrupted run had other arguments or sources; another OSError if
    `out` cannot be written; and what `list_sources` and `load_tokenizer` raise.
    """
    out = Path(out)
    if not 0 <= validation < 1:
        raise ValueError(f"validation must be at least 0 and less than 1; got {validation}")
    for name, value in (("shard_tokens", shard_tokens), ("max_documents", max_documents)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    if out.exists() or out.is_symlink():
        raise FileExistsError(
            f"{out} exists and is not overwritten: give --out a name that is free"
        )
    partial = out.with_name(out.name + ".partial")
    text_tokenizer = load_tokenizer(tokenizer)
    listing = list_sources(sources, leave_out=[partial])
    options = {
        "validation": validation,
        "seed": seed,
        "text_field": text_field,
        "shard_tokens": shard_tokens,
        "max_documents": max_documents,
    }
    with unfinished_folder(partial, out) as is_new:
        run = None
        try:
            run = _Run(partial, text_tokenizer, listing, options, skipped)
            run.read_all(progress, checkpoint_seconds)
            run.finish()
            open_corpus(partial)
        except BaseException as error:
            if run is not None:
                run.close()
            if is_new and (run is None or not run.worth_keeping):
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise OSError(
                    error.errno,
                    f"{error.strerror} to write {error.filename or partial}: make room, then run "
                    "the same command again",
                ) from error
            raise
        os.rename(partial, out)
    sync(out.parent)
    # Last of all: without this file, a run interrupted before the renaming could not go on.
    (out / PROGRESS_FILE).unlink()
    return open_corpus(out)


@dataclass
class _Batch:
    """Events in order, and the place in the sources where they end."""

    events: list[Event]
    unit: int  # index of the unit that the next event belongs to
    events_in_unit: int  # how many events of that unit come before it
    source_bytes: int  # how much of the sources was read


class _Run:
    """One run of `prepare_corpus`, new or continued."""

    def __init__(
        self,
        folder: Path,
        tokenizer: TextTokenizer,
        listing: Listing,
        options: dict[str, Any],
        on_skip: Callable[[Skip], None] | None,
    ) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.listing, self.options = listing, options
        self.arguments = run_arguments(tokenizer, listing, options)
        found = ResumeState.load(folder, self.arguments)
        self.resumed = self.worth_keeping = found is not None
        self.state = found or ResumeState()
        if not self.resumed:
            # Before anything else: this file shows that the folder belongs to a run.
            self.state.save(folder, self.arguments)
        for path in folder.glob(".*.json.*"):  # unfinished files of a process that was killed
            path.unlink()
        tokenizer.save(folder)
        self.left_out = LeftOut(listing, on_skip, self.state.skipped, self.state.ignored)
        self.splits = {
            split: SplitWriter(folder, split, tokenizer.dtype, options["shard_tokens"], entry)
            for split, entry in self.state.splits.items()
        }
        self.skip_file = AppendedFile(folder / SKIPPED_FILE, self.state.skipped_size)

    def total(self, count: str) -> int:
        """The number of "documents", "tokens" or "bytes" in both splits so far."""
        return sum(entry[count] for entry in self.state.splits.values())

    def read_all(
        self, progress: Callable[[Progress], None] | None, checkpoint_seconds: float
    ) -> None:
        """Reads, tokenizes and writes all documents that are not written yet."""
        if self.state.complete:
            return
        last = time.monotonic()
        with closing(prefetched(self._batches(), depth=2)) as batches:
            for batch in batches:
                self._write(batch)
                if time.monotonic() - last >= checkpoint_seconds:
                    self._checkpoint()
                    last = time.monotonic()
                if progress is not None:
                    progress(
                        Progress(
                            documents=self.total("documents"),
                            tokens=self.total("tokens"),
                            text_bytes=self.total("bytes"),
                            source_bytes=self.state.source_bytes,
                            source_total=self.listing.size,
                            skipped=self.state.skipped.total(),
                            resumed=self.resumed,
                        )
                    )
                if self.state.complete:
                    break
        if self.total("documents") == 0:
            self.worth_keeping = False
            raise self.left_out.no_documents()
        self.state.complete = True
        self._checkpoint()

    def _batches(self) -> Generator[_Batch, None, None]:
        """The events that are not written yet, in batches."""
        units, meter = self.listing.units, Meter()
        first, done = self.state.unit, self.state.events_in_unit
        before = sum(unit.size for unit in units[:first])
        events: list[Event] = []
        size = 0
        for index, unit in enumerate(units[first:], start=first):
            for number, event in enumerate(read_unit(unit, self.options["text_field"], meter), 1):
                if number <= done:
                    continue
                events.append(event)
                size += event.size if isinstance(event, Piece) else 0
                if size >= BATCH_BYTES or len(events) >= BATCH_EVENTS:
                    yield _Batch(events, index, number, before + meter.position())
                    events, size = [], 0
            done = 0
            before += unit.size
        yield _Batch(events, len(units), 0, before)

    def _write(self, batch: _Batch) -> None:
        """Tokenizes and appends a batch. The run is complete if it has `max_documents` then."""
        end = self.tokenizer.end_of_document
        texts = [event.text for event in batch.events if isinstance(event, Piece)]
        ids = iter(self.tokenizer.encode_batch(texts))
        for event in batch.events:
            if not isinstance(event, Piece):
                if isinstance(event, Skip):
                    line = json.dumps({"name": event.name, "reason": event.reason}) + "\n"
                    self.skip_file.write(line.encode())
                self.left_out.add(event)
                continue
            number = self.total("documents")
            held_out = in_validation(self.options["seed"], number, self.options["validation"])
            writer = self.splits["validation" if held_out else "train"]
            writer.append(next(ids), event.size)
            if event.last:
                if end is not None:
                    writer.append(np.array([end]), 0)
                writer.end_document()
                if number + 1 == self.options["max_documents"]:
                    # Set before any record: a resumed run must not read this batch again.
                    self.state.complete = True
                    return
        self.state.unit, self.state.events_in_unit = batch.unit, batch.events_in_unit
        self.state.source_bytes = batch.source_bytes

    def _checkpoint(self) -> None:
        """Records how far the run has come, once everything up to there is on the disk."""
        for file in self._open_files():
            file.sync()
        self.state.skipped_size = self.skip_file.size
        self.state.save(self.folder, self.arguments)
        self.worth_keeping = True

    def finish(self) -> None:
        """Closes all files and writes the manifest."""
        splits = {split: writer.finish() for split, writer in self.splits.items()}
        self.skip_file.close()
        tokenizer, share = self.tokenizer, self.options["validation"]
        held_out = None
        if share > 0 and splits["validation"]["documents"] == 0:
            train = TokenStream(self.folder, "train", splits["train"], tokenizer.dtype)
            held_out = range_to_hold_out(train, share, tokenizer)
        content = {
            "library_version": trellis.__version__,
            "tokenizer": {
                "name": tokenizer.name,
                "sha256": tokenizer.sha256,
                "vocab_size": tokenizer.vocab_size,
                "end_of_document": tokenizer.end_of_document,
            },
            "dtype": tokenizer.dtype.str,
            "options": self.options,
            "sources": self.listing.sources,
            "splits": splits,
            "held_out": held_out,
            "skipped": {
                "count": self.state.skipped.total(),
                "reasons": dict(sorted(self.state.skipped.items())),
                "file": SKIPPED_FILE,
                "size": self.skip_file.size,
                "sha256": sha256_of(self.skip_file.path),
            },
            "ignored": dict(sorted(self.left_out.all_ignored().items())),
        }
        write_manifest(self.folder, content)
        sync(self.folder)

    def _open_files(self) -> list[AppendedFile]:
        writers = self.splits.values()
        return [self.skip_file, *(file for writer in writers for file in writer.open_files())]

    def close(self) -> None:
        """Closes all files after an error, even if some of them cannot be written any more."""
        for file in self._open_files():
            with suppress(OSError):
                file.close()


def in_validation(seed: int, document: int, share: float) -> bool:
    """Whether a document is held out: a hash of seed and number, the same on every machine."""
    return mix(seed, document) < share * 2.0**64


def range_to_hold_out(
    train: TokenStream, share: float, tokenizer: TextTokenizer
) -> dict[str, Any] | None:
    """The end of the last training document, for validation when no document was held out.

    Takes that share of all tokens, but at most half of the document; None if that is no token.
    """
    document = int(train.ends[-2]) if train.documents > 1 else 0
    count = min(max(1, round(share * train.tokens)), (train.tokens - document) // 2)
    if count == 0:
        return None
    start = train.tokens - count
    for place in range(start, min(start + 4, train.tokens)):
        # The first token that does not begin inside a character, which has at most four bytes.
        text = tokenizer.decode(train.read(place, min(place + 8, train.tokens)))
        if not text.startswith("\ufffd"):
            start = place
            break
    decoder = tokenizer.stream_decoder()
    size = 0
    for at in range(start, train.tokens, 1 << 20):
        ids = train.read(at, min(at + (1 << 20), train.tokens))
        size += len(decoder.feed(ids.tolist()).encode())
    size += len(decoder.finish().encode())
    return {
        "start": start,
        "tokens": train.tokens - start,
        "bytes": size,
        "why": "no document fell to validation; it is the end of the last training document",
    }


def prefetched(items: Generator[T, None, None], depth: int) -> Generator[T, None, None]:
    """Runs a generator in a thread, `depth` items ahead of the reader, who gets its exceptions.

    At the end, or when this is closed, the thread ends and the generator is closed.
    """
    thread = ThreadPoolExecutor(max_workers=1)
    try:
        ahead = deque(thread.submit(next, items, None) for _ in range(depth))
        while (item := ahead.popleft().result()) is not None:
            ahead.append(thread.submit(next, items, None))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)
        items.close()
