"""Writes the token stream of a split in such a way that an interrupted run can go on exactly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..files import naming, sha256_of
from .shards import END_DTYPE, ends_name, shard_name


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
        state: dict[str, Any] | None = None,
    ) -> None:
        """state: what `state()` of an earlier writer returned; this one goes on from there.

        Shards that were begun later are written again, since a resumed run appends the same tokens.

        Raises ValueError if the files of the earlier writer are missing or shorter.
        """
        state = state or {"tokens": 0, "documents": 0, "bytes": 0, "shards": []}
        self.folder = folder
        self.split = split
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.tokens: int = state["tokens"]
        self.documents: int = state["documents"]
        self.bytes: int = state["bytes"]
        self._full: list[dict[str, Any]] = list(state["shards"])
        self._ends = AppendedFile(folder / ends_name(split), self.documents * END_DTYPE.itemsize)
        self._shard: AppendedFile | None = None
        for shard in self._full:
            path, size = folder / shard["file"], shard["tokens"] * dtype.itemsize
            if not path.exists() or path.stat().st_size != size:
                raise ValueError(f"{path} was changed: remove {folder} and start again")
        open_tokens = self.tokens - len(self._full) * shard_tokens
        if open_tokens:
            self._shard = self._open_shard(open_tokens * dtype.itemsize)

    def state(self) -> dict[str, Any]:
        """What another writer needs to go on from here, if everything is synced."""
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.bytes,
            "shards": self._full,
        }

    def append(self, ids: np.ndarray, text_bytes: int) -> None:
        """Appends tokens, which stand for `text_bytes` bytes of text, to the current document."""
        data = np.ascontiguousarray(ids, self.dtype)
        start = 0
        while start < len(data):
            if self._shard is None:
                self._shard = self._open_shard(0)
            room = self.shard_tokens - self._shard.size // self.dtype.itemsize
            part = data[start : start + room]
            self._shard.write(part.view(np.uint8).data)
            self.tokens += len(part)
            start += len(part)
            if len(part) == room:
                self._close_shard()
        self.bytes += text_bytes

    def end_document(self) -> None:
        self._ends.write(np.array([self.tokens], END_DTYPE).tobytes())
        self.documents += 1

    def sync(self) -> None:
        """Waits until everything that was appended is on the disk."""
        for file in self.open_files():
            file.sync()

    def open_files(self) -> list[AppendedFile]:
        return [self._ends] if self._shard is None else [self._shard, self._ends]

    def finish(self) -> dict[str, Any]:
        """Closes the files and returns the split's entry for the manifest."""
        if self._shard is not None:
            self._close_shard()
        self._ends.close()
        return {**self.state(), "documents_sha256": sha256_of(self._ends.path)}

    def _open_shard(self, size: int) -> AppendedFile:
        return AppendedFile(self.folder / shard_name(self.split, len(self._full)), size)

    def _close_shard(self) -> None:
        shard = self._shard
        assert shard is not None
        shard.close()
        tokens, sha256 = shard.size // self.dtype.itemsize, sha256_of(shard.path)
        self._full.append({"file": shard.path.name, "tokens": tokens, "sha256": sha256})
        self._shard = None
