"""Files that are written whole or not at all, locks on folders, and hashes of files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

BLOCK = 2**20
_UMASK = threading.Lock()


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file beside the target, then renames it: the target is never half written."""
    with whole_file(path) as file:
        file.write(data)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON in ASCII, since names of files that are not UTF-8 cannot be encoded."""
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode("ascii"))


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def usual_mode(mode: int) -> int:
    """The permissions that a new file (0o666) or folder (0o777) gets from this process."""
    with _UMASK:  # it can only be read by setting it, which another thread must not see
        mask = os.umask(0)
        os.umask(mask)
    return mode & ~mask


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to. At the end it replaces the target; after an error it is removed."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, usual_mode(0o666))  # mkstemp lets only its owner read it
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to an OSError that names no file, such as "No space left on device"."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from locking a folder until the block, or this process, ends.

    Raises:
        ValueError: another process has locked it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle, f"another process is at work in {folder}: wait for it, or stop it")
        yield
    finally:
        os.close(handle)


def lock(handle: int, message: str) -> None:
    """Locks an open file or folder until it is closed; does nothing on Windows.

    Raises:
        ValueError: another process has locked it. `message` is the text of the error.
    """
    if fcntl is None:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(message) from error


def sync(path: Path) -> None:
    """Waits until a file, or the list of files in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """The sha256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
