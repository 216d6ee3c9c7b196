"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

BLOCK = 2**20


def write_whole(path: Path, data: bytes) -> None:
    """Write beside the target, then rename: what was there stays until the new file is whole."""
    with whole_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write into that replaces the target at the end, if nothing failed."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # as for any new file; mkstemp's is for its owner alone
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a folder for this process alone, as long as it lives.

    Raises:
        ValueError: another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle, f"another process is at work in {folder}: wait for it, or stop it")
        yield
    finally:
        os.close(handle)


def lock(handle: int, held: str) -> None:
    """Locks an open file or folder until it is closed; does nothing on Windows.

    Raises:
        ValueError: another process holds it; `held` says so.
    """
    if fcntl is None:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(held) from error


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hash_file(
    path: Path, length: int | None = None, advance: Callable[[int], None] | None = None
) -> Any:
    """A hashlib sha256 over a file's first `length` bytes, or over all of it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while length is None or length > 0:
            block = file.read(BLOCK if length is None else min(BLOCK, length))
            if not block:
                break
            digest.update(block)
            if length is not None:
                length -= len(block)
            if advance is not None:
                advance(len(block))
    return digest


def sha256_of(path: Path) -> str:
    """Of a file's contents, read in blocks."""
    return hash_file(path).hexdigest()
