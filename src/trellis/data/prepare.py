"""Text to a corpus on disk: `prepare_corpus` reads, tokenizes and writes in one bounded stream.

A thread reads and decompresses, a second one tokenizes (with all cores), the caller's writes. The
output grows in `DIR.partial` and becomes `DIR` in one step at the end. `progress.json` in it
records how far every file is valid, so that the same call goes on after an interruption and ends
with the same bytes as a run without one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import trellis

from ..files import lock, sync
from .documents import Event, Piece, Skip
from .prefetch import Prefetched
from .shard_writer import AppendedFile, SplitWriter, write_json
from .shards import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_FILE,
    PROGRESS_FILE,
    SPLIT_LAYOUT,
    SPLITS,
    Corpus,
    TokenStream,
    check_layout,
    open_corpus,
)
from .shuffle import mix
from .sources import Listing, Meter, list_sources, no_documents, read_unit
from .tokenizer import TextTokenizer, canonical, load_tokenizer

SKIPPED_FILE = "skipped.jsonl"
#: Text that is read, tokenized and written together.
BATCH_BYTES = 4 << 20
BATCH_EVENTS = 10_000
#: Seconds between two records of the progress.
CHECKPOINT_SECONDS = 1.0

_PROGRESS_LAYOUT = {
    "arguments": {},
    "unit": int,
    "events_in_unit": int,
    "source_bytes": int,
    "complete": bool,
    "held_out": ({"why": str},),
    "splits": {},
    "skipped_size": int,
    "skipped": {},
    "ignored": {},
}


@dataclass
class Progress:
    """How far a run is, for display."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    source_bytes: int = 0
    source_total: int | None = None  # None if it is not known
    skipped: int = 0
    resumed: bool = False


@dataclass
class _Batch:
    """Events in order, and where their reading ended."""

    unit: int  # index of the unit that the next event belongs to
    events_in_unit: int  # events of that unit up to there
    source_bytes: int
    events: list[Event] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)  # of each Piece among the events


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

    validation: the share of documents that go to the validation split, chosen by `seed`.
    max_documents: stops after so many.
    progress: called after each batch. skipped: called with each input that is left out.

    Raises FileExistsError if `out` exists; ValueError if an argument is out of range, if no
    document was found, or if an interrupted run had other arguments or sources; another OSError if
    `out` cannot be written; and what `list_sources` and `load_tokenizer` raise.
    """
    out = Path(out)
    _check_arguments(validation, shard_tokens, max_documents)
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
    with _locked_folder(partial, out) as is_new:
        run = None
        try:
            run = _Run(partial, text_tokenizer, listing, options, checkpoint_seconds, skipped)
            run.read_all(progress)
            run.finish()
            open_corpus(partial)
        except BaseException:
            if run is not None:
                with suppress(OSError):  # a full disk must not hide why the run failed
                    run.close()
            if is_new and (run is None or not run.worth_keeping):
                shutil.rmtree(partial, ignore_errors=True)
            raise
        os.rename(partial, out)
    sync(out.parent)
    # Only now: without it, a run that is interrupted before the renaming could not go on.
    (out / PROGRESS_FILE).unlink()
    return open_corpus(out)


class _Run:
    """One run of `prepare_corpus`, new or continued."""

    def __init__(
        self,
        folder: Path,
        tokenizer: TextTokenizer,
        listing: Listing,
        options: dict[str, Any],
        checkpoint_seconds: float,
        on_skip: Callable[[Skip], None] | None,
    ) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.listing = listing
        self.options = options
        self.checkpoint_seconds = checkpoint_seconds
        self.on_skip = on_skip
        self.arguments = {
            "format_version": FORMAT_VERSION,
            "library_version": trellis.__version__,
            "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
            **options,
            "sources": [entry["source"] for entry in listing.sources],
            "units": _units_identity(listing),
        }
        state = self._load_state()
        self.resumed = state is not None
        if state is None:
            state = {"unit": 0, "events_in_unit": 0, "source_bytes": 0, "complete": False,
                     "held_out": None, "splits": {}, "skipped_size": 0, "skipped": {},
                     "ignored": {}}  # fmt: skip
            # Before anything else: this file tells that the folder is ours.
            self._write_progress(state)
        for path in folder.glob(".*.json.*"):  # parts of files, left by a process that was killed
            path.unlink()
        tokenizer.save(folder)
        self.unit: int = state["unit"]
        self.events_in_unit: int = state["events_in_unit"]
        self.source_bytes: int = state["source_bytes"]
        self.complete: bool = state["complete"]
        self.held_out: dict[str, Any] | None = state["held_out"]
        self.skip_counts: Counter[str] = Counter(state["skipped"])
        self.ignored: Counter[str] = Counter(state["ignored"])
        self.splits = {
            split: SplitWriter(
                folder, split, tokenizer.dtype, options["shard_tokens"], state["splits"].get(split)
            )
            for split in SPLITS
        }
        self.skip_file = AppendedFile(folder / SKIPPED_FILE, state["skipped_size"])
        self.first_skips: list[Skip] = []
        self.worth_keeping = self.resumed
        self._last_checkpoint = time.monotonic()

    # Reading.

    def read_all(self, progress: Callable[[Progress], None] | None) -> None:
        if self.complete:
            return
        shown = Progress(resumed=self.resumed, source_total=self.listing.size)
        with (
            closing(Prefetched(self._batches(), depth=2)) as read,
            closing(Prefetched(_encoded(iter(read), self.tokenizer), depth=1)) as batches,
        ):
            for batch in batches:
                self._write(batch)
                if time.monotonic() - self._last_checkpoint >= self.checkpoint_seconds:
                    self._checkpoint()
                if progress is not None:
                    self._show(shown, progress)
                if self.complete:
                    break
        if self.documents == 0:
            self.worth_keeping = False
            ignored = self.listing.ignored + self.ignored
            sources = [entry["source"] for entry in self.listing.sources]
            count = self.skip_counts.total()
            raise ValueError(no_documents(sources, self.first_skips, count, ignored))
        self.complete = True
        self._checkpoint()

    @property
    def documents(self) -> int:
        return sum(writer.documents for writer in self.splits.values())

    def _batches(self) -> Iterator[_Batch]:
        """Events from where the run stands, in batches."""
        meter = Meter()
        units = self.listing.units
        before = sum(unit.size for unit in units[: self.unit])
        batch = _Batch(self.unit, self.events_in_unit, before)
        size = 0
        for index in range(self.unit, len(units)):
            seen = 0
            done = self.events_in_unit if index == self.unit else 0
            for event in read_unit(units[index], self.options["text_field"], meter):
                seen += 1
                if seen <= done:
                    continue
                batch.events.append(event)
                if isinstance(event, Piece):
                    size += event.size
                if size >= BATCH_BYTES or len(batch.events) >= BATCH_EVENTS:
                    batch.unit, batch.events_in_unit = index, seen
                    batch.source_bytes = before + meter.position()
                    yield batch
                    batch = _Batch(index, seen, before)
                    size = 0
            before += units[index].size
            batch.unit, batch.events_in_unit, batch.source_bytes = index + 1, 0, before
        yield batch

    # Writing.

    def _write(self, batch: _Batch) -> None:
        """Appends a batch; complete if there are enough documents then."""
        limit = self.options["max_documents"]
        ids = iter(batch.ids)
        for event in batch.events:
            if isinstance(event, Piece):
                writer = self._writer()
                writer.append(next(ids))
                writer.bytes += event.size
                if event.last:
                    if self.tokenizer.end_of_document is not None:
                        writer.append(np.array([self.tokenizer.end_of_document]))
                    writer.end_document()
                    if limit is not None and self.documents >= limit:
                        # At once: what is recorded from here on must not be read again.
                        self.complete = True
                        return
            elif isinstance(event, Skip):
                self._write_skip(event)
            else:
                self.ignored[event.suffix] += 1
        self.unit, self.events_in_unit = batch.unit, batch.events_in_unit
        self.source_bytes = batch.source_bytes

    def _writer(self) -> SplitWriter:
        """Of the split that the current document belongs to."""
        share = self.options["validation"]
        held_out = in_validation(self.options["seed"], self.documents, share)
        return self.splits["validation" if held_out else "train"]

    def _write_skip(self, skip: Skip) -> None:
        line = json.dumps({"name": skip.name, "reason": skip.reason}) + "\n"
        self.skip_file.write(line.encode())
        self.skip_counts[skip.category] += 1
        if len(self.first_skips) < 5:
            self.first_skips.append(skip)
        if self.on_skip is not None:
            self.on_skip(skip)

    def _show(self, shown: Progress, progress: Callable[[Progress], None]) -> None:
        writers = self.splits.values()
        shown.documents = self.documents
        shown.tokens = sum(w.tokens for w in writers)
        shown.text_bytes = sum(w.bytes for w in writers)
        shown.source_bytes = self.source_bytes
        shown.skipped = self.skip_counts.total()
        progress(shown)

    # The end.

    def finish(self) -> None:
        """Everything but the renaming of the folder."""
        if self.held_out is None:
            self._hold_out_tail()
        if self.held_out is not None:
            self.splits["train"].end_document()
        splits = {split: writer.finish() for split, writer in self.splits.items()}
        self.skip_file.close()
        write_json(self.folder / MANIFEST_FILE, self._manifest(splits))
        sync(self.folder)

    def _hold_out_tail(self) -> None:
        """Moves the end of the last training document to validation, if that got no document.

        Leaves the training split's last document open; its end is written by `finish`, also after
        an interruption here.
        """
        train, validation = self.splits["train"], self.splits["validation"]
        share = self.options["validation"]
        if share == 0 or validation.documents:
            return
        stream = train.stream()
        start = int(stream.ends[-2]) if stream.documents > 1 else 0
        count = min(max(1, round(share * stream.tokens)), (stream.tokens - start) // 2)
        if count == 0:
            return
        first = _character_start(stream, stream.tokens - count, self.tokenizer)
        decoder = self.tokenizer.stream_decoder()
        for at in range(first, stream.tokens, 1 << 20):
            ids = stream.read(at, min(at + (1 << 20), stream.tokens))
            validation.append(ids)
            validation.bytes += len(decoder.feed(ids.tolist()).encode())
        validation.bytes += len(decoder.finish().encode())
        validation.end_document()
        validation.sync()
        self.held_out = {
            "tokens": validation.tokens,
            "why": "no document fell to validation; it is the end of the last training document",
        }
        state = {
            "tokens": first,
            "documents": train.documents - 1,
            "bytes": train.bytes - validation.bytes,
            "shards": train.state()["shards"][: first // train.shard_tokens],
        }
        # Recorded before anything is cut off: an interrupted run finds it and cuts again.
        self._record({"train": state, "validation": validation.state()})
        train.close()
        self.splits["train"] = SplitWriter(
            self.folder, "train", train.dtype, train.shard_tokens, state
        )

    def _manifest(self, splits: dict[str, Any]) -> dict[str, Any]:
        tokenizer = self.tokenizer
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
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
            "held_out": self.held_out,
            "skipped": {
                "count": self.skip_counts.total(),
                "reasons": dict(sorted(self.skip_counts.items())),
                "file": SKIPPED_FILE,
                "size": self.skip_file.size,
                "sha256": self.skip_file.sha256,
            },
            "ignored": dict(sorted((self.listing.ignored + self.ignored).items())),
        }

    # The record of the progress.

    def _checkpoint(self) -> None:
        for writer in self.splits.values():
            writer.sync()
        self.skip_file.sync()
        self._record()
        self.worth_keeping = True
        self._last_checkpoint = time.monotonic()

    def _record(self, splits: dict[str, Any] | None = None) -> None:
        self._write_progress(
            {
                "unit": self.unit,
                "events_in_unit": self.events_in_unit,
                "source_bytes": self.source_bytes,
                "complete": self.complete,
                "held_out": self.held_out,
                "splits": splits or {s: writer.state() for s, writer in self.splits.items()},
                "skipped_size": self.skip_file.size,
                "skipped": self.skip_counts,
                "ignored": self.ignored,
            }
        )

    def _write_progress(self, state: dict[str, Any]) -> None:
        content = {"format": FORMAT, "arguments": self.arguments, **state}
        write_json(self.folder / PROGRESS_FILE, content)

    def _load_state(self) -> dict[str, Any] | None:
        """What an interrupted run recorded; None if there was none."""
        path = self.folder / PROGRESS_FILE
        again = f"finish that run with its own arguments, or remove {self.folder} to start anew"
        if not path.exists():
            return None
        try:
            state: dict[str, Any] = json.loads(path.read_bytes())
            check_layout(state, _PROGRESS_LAYOUT)
            for name, split in state["splits"].items():
                check_layout(split, SPLIT_LAYOUT, name)
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged ({error}): remove {self.folder} to start anew"
            ) from error
        before = state["arguments"]
        now = json.loads(json.dumps(self.arguments))
        differences = [
            f"  {key}: {before.get(key)!r} then, {now.get(key)!r} now"
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key)
        ]
        if differences:
            lines = "\n".join(differences)
            raise ValueError(
                f"{self.folder} is an unfinished run with other arguments or sources:\n{lines}\n"
                f"{again}"
            )
        return state

    def close(self) -> None:
        for writer in self.splits.values():
            writer.close()
        self.skip_file.close()


def in_validation(seed: int, document: int, share: float) -> bool:
    """Whether a document is held out: a hash of seed and number, the same on every machine."""
    return mix(seed, document) < share * 2.0**64


def _character_start(stream: TokenStream, at: int, tokenizer: TextTokenizer) -> int:
    """The first place from `at` on that is not inside a character (of at most four bytes)."""
    for place in range(at, min(at + 4, stream.tokens)):
        text = tokenizer.decode(stream.read(place, min(place + 8, stream.tokens)))
        if not text.startswith("\ufffd"):
            return place
    return at


def _encoded(batches: Iterator[_Batch], tokenizer: TextTokenizer) -> Iterator[_Batch]:
    for batch in batches:
        texts = [event.text for event in batch.events if isinstance(event, Piece)]
        batch.ids = tokenizer.encode_batch(texts)
        # The text is not needed any more, and may be larger than the tokens.
        batch.events = [
            Piece(event.name, "", event.size, event.last) if isinstance(event, Piece) else event
            for event in batch.events
        ]
        yield batch


def _check_arguments(validation: float, shard_tokens: int, max_documents: int | None) -> None:
    if not (math.isfinite(validation) and 0 <= validation < 1):
        raise ValueError(f"validation must be at least 0 and less than 1; got {validation}")
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens must be at least 1; got {shard_tokens}")
    if max_documents is not None and max_documents < 1:
        raise ValueError(f"max_documents must be at least 1; got {max_documents}")


def _units_identity(listing: Listing) -> dict[str, Any]:
    identities = [unit.identity() for unit in listing.units]
    return {
        "count": len(identities),
        "bytes": sum(unit.size for unit in listing.units),
        "sha256": hashlib.sha256(canonical(identities)).hexdigest(),
    }


@contextmanager
def _locked_folder(partial: Path, out: Path) -> Iterator[bool]:
    """The folder of an unfinished run, which is kept from other runs; whether it was made here.

    Raises FileExistsError if there is something else of that name.
    """
    is_new = False
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            partial.mkdir()
            is_new = True
        handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise type(error)(
            error.errno, f"{partial}, where {out} grows, cannot be written: {error.strerror}"
        ) from error
    try:
        lock(handle, f"another run is writing {partial}: wait for it, or stop it")
        if out.exists() or not partial.exists():  # another run ended meanwhile
            raise FileExistsError(f"{out} exists and is not overwritten")
        if not _may_be_written(partial):
            raise FileExistsError(
                f"{partial} exists and is no unfinished run (it has no {PROGRESS_FILE}): "
                "move it away, or choose another --out"
            )
        yield is_new
    finally:
        os.close(handle)


def _may_be_written(partial: Path) -> bool:
    """Whether a run recorded itself here, or was killed before it could."""
    return (partial / PROGRESS_FILE).exists() or all(
        path.name.startswith(f".{PROGRESS_FILE}.") for path in partial.iterdir()
    )
