"""The output of an unfinished `prepare_corpus`, written so that the same call can go on exactly.

The output grows in the folder `OUT.partial`. The file `progress.json` in it records the arguments
of the run, how far the sources were read, and how much of every output file is valid; whatever was
written after that is cut off and written again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import trellis

from ..files import lock, naming, parse_json, sha256_of, write_json
from .shards import (
    END_DTYPE,
    FORMAT,
    PROGRESS_FILE,
    RANGE_HELD_OUT,
    SPLIT_LAYOUT,
    SPLITS,
    check_layout,
    ends_name,
)
from .sources import Listing
from .tokenizer import TextTokenizer, canonical


@dataclass
class ResumeState:
    """How far a run has come."""

    unit: int = 0  # index of the unit that the next event belongs to
    events_in_unit: int = 0  # how many events of that unit were written
    source_bytes: int = 0  # how much of the sources was read
    complete: bool = False  # all documents were written
    splits: dict[str, Any] = field(default_factory=lambda: {split: _empty() for split in SPLITS})
    skipped_size: int = 0  # bytes of skipped.jsonl
    skipped: Counter[str] = field(default_factory=Counter)  # skipped inputs by category
    ignored: Counter[str] = field(default_factory=Counter)  # ignored members by suffix

    def save(self, folder: Path, arguments: dict[str, Any]) -> None:
        content = {"format": FORMAT, "arguments": arguments, **vars(self)}
        write_json(folder / PROGRESS_FILE, content)

    @classmethod
    def load(cls, folder: Path, arguments: dict[str, Any]) -> ResumeState | None:
        """The recorded state of an unfinished run; None if nothing was recorded.

        Raises ValueError if the record is damaged, or is of a run with other arguments.
        """
        path = folder / PROGRESS_FILE
        if not path.exists():
            return None
        try:
            found = parse_json(path.read_bytes())
            check_layout(found, _LAYOUT)
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged ({error}): remove {folder} to start anew"
            ) from error
        then, now = found["arguments"], json.loads(json.dumps(arguments))
        differences = [
            f"  {key}: {then.get(key)!r} then, {now.get(key)!r} now"
            for key in sorted({*then, *now})
            if then.get(key) != now.get(key)
        ]
        if differences:
            lines = "\n".join(differences)
            raise ValueError(
                f"{folder} is an unfinished run with other arguments or sources:\n{lines}\n"
                f"finish that run with its own arguments, or remove {folder} to start anew"
            )
        state = cls(**{name: found[name] for name in vars(cls())})
        state.skipped, state.ignored = Counter(state.skipped), Counter(state.ignored)
        return state


def _empty() -> dict[str, Any]:
    """The counts of a split, and its full shards, before the first document."""
    return {"tokens": 0, "documents": 0, "bytes": 0, "shards": []}


#: The layout of progress.json: the arguments, and the fields of ResumeState with their types.
_LAYOUT: dict[str, Any] = {
    **{name: {} if isinstance(x, dict) else type(x) for name, x in vars(ResumeState()).items()},
    "arguments": {},
    "splits": {split: SPLIT_LAYOUT for split in SPLITS},
}


def run_arguments(
    tokenizer: TextTokenizer, listing: Listing, options: dict[str, Any]
) -> dict[str, Any]:
    """Everything that must be the same when an interrupted run goes on."""
    units = [[unit.kind, unit.name, unit.size, unit.modified] for unit in listing.units]
    return {
        "format_version": RANGE_HELD_OUT,
        "library_version": trellis.__version__,
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
        **options,
        "sources": [entry["source"] for entry in listing.sources],
        "units": {
            "count": len(units),
            "bytes": sum(unit.size for unit in listing.units),
            "sha256": hashlib.sha256(canonical(units)).hexdigest(),
        },
    }


@contextmanager
def unfinished_folder(partial: Path, out: Path) -> Iterator[bool]:
    """Makes `partial`, where `out` grows, or takes one that is there; other runs are locked out.

    Yields whether the folder is new. Raises FileExistsError if something else has that name.
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
        if out.exists() or not partial.exists():  # another run has ended meanwhile
            raise FileExistsError(f"{out} exists and is not overwritten")
        # A run that was killed before its first record may have left a part of that file.
        if not (partial / PROGRESS_FILE).exists() and any(
            not path.name.startswith(f".{PROGRESS_FILE}.") for path in partial.iterdir()
        ):
            raise FileExistsError(
                f"{partial} exists and is no unfinished run (it has no {PROGRESS_FILE}): "
                "move it away, or choose another --out"
            )
        yield is_new
    finally:
        os.close(handle)


class AppendedFile:
    """A file that is only appended to, and can go on from a recorded size."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """Opens the file and cuts it to `size` bytes.

        Raises ValueError if it has fewer: bytes that were recorded as written are missing.
        """
        self.path = path
        found = path.stat().st_size if path.exists() else 0
        if found < size:
            raise ValueError(
                f"{path} has {found:,} bytes, expected at least {size:,}: it cannot be continued; "
                f"remove {path.parent} and start again"
            )
        self.size = size
        self._file: BinaryIO = path.open("ab")
        self._file.truncate(size)

    def write(self, data: bytes | memoryview) -> None:
        with naming(self.path):
            self._file.write(data)
        self.size += memoryview(data).nbytes

    def sync(self) -> None:
        """Waits until everything that was written is on the disk."""
        with naming(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self.sync()
        finally:  # otherwise data that found no room would be written when this is collected
            with naming(self.path):
                self._file.close()


class SplitWriter:
    """Appends documents to a split, in shards of at most `shard_tokens` tokens."""

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: np.dtype,
        shard_tokens: int,
        entry: dict[str, Any],
    ) -> None:
        """entry: the split's entry in `ResumeState.splits`, which grows with what is appended.

        Shards that were begun later are written again, since a resumed run appends the same tokens.

        Raises ValueError if files that the entry counts are missing or shorter.
        """
        self.folder, self.split, self.dtype = folder, split, dtype
        self.shard_tokens, self.entry = shard_tokens, entry
        size = entry["documents"] * END_DTYPE.itemsize
        self._ends = AppendedFile(folder / ends_name(split), size)
        self._shard: AppendedFile | None = None
        for shard in entry["shards"]:
            path, size = folder / shard["file"], shard["tokens"] * dtype.itemsize
            if not path.exists() or path.stat().st_size != size:
                raise ValueError(f"{path} was changed: remove {folder} and start again")
        open_tokens = entry["tokens"] - len(entry["shards"]) * shard_tokens
        if open_tokens:
            self._shard = self._open_shard(open_tokens * dtype.itemsize)

    def append(self, ids: np.ndarray, text_bytes: int) -> None:
        """Appends tokens, which stand for `text_bytes` bytes of text, to the current document."""
        data = np.ascontiguousarray(ids, self.dtype)
        while len(data):
            if self._shard is None:
                self._shard = self._open_shard(0)
            room = self.shard_tokens - self._shard.size // self.dtype.itemsize
            part, data = data[:room], data[room:]
            self._shard.write(part.view(np.uint8).data)
            self.entry["tokens"] += len(part)
            if len(part) == room:
                self._close_shard(self._shard)
        self.entry["bytes"] += text_bytes

    def end_document(self) -> None:
        self._ends.write(np.array([self.entry["tokens"]], END_DTYPE).tobytes())
        self.entry["documents"] += 1

    def open_files(self) -> list[AppendedFile]:
        return [self._ends] if self._shard is None else [self._shard, self._ends]

    def finish(self) -> dict[str, Any]:
        """Closes the files and returns the split's entry for the manifest."""
        if self._shard is not None:
            self._close_shard(self._shard)
        self._ends.close()
        return {**self.entry, "documents_sha256": sha256_of(self._ends.path)}

    def _open_shard(self, size: int) -> AppendedFile:
        name = f"{self.split}-{len(self.entry['shards']):05d}.bin"
        return AppendedFile(self.folder / name, size)

    def _close_shard(self, shard: AppendedFile) -> None:
        shard.close()
        tokens, sha256 = shard.size // self.dtype.itemsize, sha256_of(shard.path)
        self.entry["shards"].append({"file": shard.path.name, "tokens": tokens, "sha256": sha256})
        self._shard = None
