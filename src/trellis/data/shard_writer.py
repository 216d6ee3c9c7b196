"""Writes the token stream of a split, such that an interrupted run can go on exactly."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..files import hash_file, write_whole
from .shards import END_DTYPE, TokenStream, ends_name, shard_name


class AppendedFile:
    """A file that is only appended to, with its hash; continues at a recorded length."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """Cuts the file to `size` bytes.

        Raises ValueError if it has fewer: what was recorded as written is gone.
        """
        self.path = path
        found = path.stat().st_size if path.exists() else 0
        if found < size:
            raise ValueError(
                f"{path} has {found:,} bytes, expected at least {size:,}: it cannot be continued; "
                f"remove {path.parent} and start again"
            )
        self.size = size
        self._hash: Any = hash_file(path, size) if size else hashlib.sha256()
        self._file: BinaryIO = path.open("ab")
        self._file.truncate(size)

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += memoryview(data).nbytes

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


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
        """`state`, from `state()` of an earlier writer, continues exactly there."""
        state = state or {"tokens": 0, "documents": 0, "bytes": 0, "shards": []}
        self.folder = folder
        self.split = split
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.tokens: int = state["tokens"]
        self.documents: int = state["documents"]
        self.bytes: int = state["bytes"]
        self._shards: list[dict[str, Any]] = list(state["shards"])  # the full ones
        self._ends = AppendedFile(folder / ends_name(split), self.documents * END_DTYPE.itemsize)
        self._shard: AppendedFile | None = None
        self._remove_later_shards()
        for shard in self._shards:
            # Full shards are left alone; this only asserts that they are still there.
            path, size = folder / shard["file"], shard["tokens"] * dtype.itemsize
            if not path.exists() or path.stat().st_size != size:
                raise ValueError(f"{path} was changed: remove {folder} and start again")
        open_tokens = self.tokens - len(self._shards) * shard_tokens
        if open_tokens:
            self._shard = self._open_shard(open_tokens * dtype.itemsize)

    def state(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.bytes,
            "shards": self._shards,
        }

    def append(self, ids: np.ndarray) -> None:
        """Tokens of the document that is being written."""
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

    def end_document(self) -> None:
        self._ends.write(np.array([self.tokens], END_DTYPE).tobytes())
        self.documents += 1

    def stream(self) -> TokenStream:
        """What was written so far, for reading."""
        self.sync()
        shards = list(self._shards)
        if self._shard is not None:
            tokens = self._shard.size // self.dtype.itemsize
            shards.append({"file": self._shard.path.name, "tokens": tokens})
        return TokenStream(self.folder, self.split, {**self.state(), "shards": shards}, self.dtype)

    def sync(self) -> None:
        """Everything that was appended is on disk after this."""
        for file in (self._shard, self._ends):
            if file is not None:
                file.sync()

    def close(self) -> None:
        if self._shard is not None:
            self._shard.close()
        self._ends.close()

    def finish(self) -> dict[str, Any]:
        """Closes the files; returns the split's entry of the manifest."""
        if self._shard is not None:
            self._close_shard()
        self._ends.close()
        return {**self.state(), "documents_sha256": self._ends.sha256}

    def _open_shard(self, size: int) -> AppendedFile:
        return AppendedFile(self.folder / shard_name(self.split, len(self._shards)), size)

    def _close_shard(self) -> None:
        shard = self._shard
        assert shard is not None
        shard.close()
        tokens = shard.size // self.dtype.itemsize
        self._shards.append({"file": shard.path.name, "tokens": tokens, "sha256": shard.sha256})
        self._shard = None

    def _remove_later_shards(self) -> None:
        index = len(self._shards)
        open_shard = self.tokens > index * self.shard_tokens
        for path in sorted(self.folder.glob(f"{self.split}-[0-9]*.bin")):
            number = int(path.stem.rpartition("-")[2])
            if number > index or (number == index and not open_shard):
                path.unlink()


def write_json(path: Path, content: Any) -> None:
    """In ASCII: a file name that is not UTF-8 is a string that cannot be encoded."""
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode("ascii"))
