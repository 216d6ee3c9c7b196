"""Byte streams out of compressed files. A truncated or broken file raises one of READ_ERRORS."""

from __future__ import annotations

import contextlib
import importlib
import io
import tarfile
import zlib
from typing import IO, Any

#: The compression of a file by its suffix.
SUFFIXES = {".gz": "gz", ".xz": "xz", ".bz2": "bz2", ".zst": "zst"}
#: The modules of Python that read compressions; some builds of Python leave one out.
_MODULES = {"gz": "gzip", "xz": "lzma", "bz2": "bz2"}
_BUFFER = 1 << 20

READ_ERRORS: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, tarfile.TarError)
with contextlib.suppress(ModuleNotFoundError):  # some builds of Python have no lzma
    from lzma import LZMAError

    READ_ERRORS = (*READ_ERRORS, LZMAError)


def optional(module: str, purpose: str, extra: str = "data") -> Any:
    """Imports a module that an extra of this package installs.

    Raises ModuleNotFoundError that names the purpose and what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{purpose} needs {module}: pip install 'trellis-memory[{extra}]'", name=module
        ) from error


def check_available(compression: str | None, name: str) -> None:
    """Raises ModuleNotFoundError if the module that reads this compression is not installed."""
    if compression == "zst":
        optional("zstandard", f"reading {name}")
    elif compression is not None:
        importlib.import_module(_MODULES[compression])


def decompressed(file: IO[bytes], compression: str | None) -> IO[bytes]:
    """The content of a file as a buffered stream."""
    if compression is None:
        return file
    if compression == "zst":
        raw: Any = _ZstdStream(file)
    else:
        raw = importlib.import_module(_MODULES[compression]).open(file)
    return io.BufferedReader(raw, _BUFFER)


class _ZstdStream(io.RawIOBase):
    """The content of all frames of a zstd file.

    The library's own reader does not notice that a file is truncated.
    """

    #: Bytes to decompress at a time: few, because zstd can expand them 32,000-fold.
    _BITE = 1 << 13

    def __init__(self, file: IO[bytes]) -> None:
        zstandard = optional("zstandard", "reading .zst files")
        self._file = file
        self._error = zstandard.ZstdError
        self._context = zstandard.ZstdDecompressor(max_window_size=2**31)
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if not self._input:
                self._input = self._file.read(self._BITE)
                if not self._input:
                    if self._frame is not None:
                        raise EOFError("compressed file ended before the end of its zstd frame")
                    return 0
            if self._frame is None:
                self._frame = self._context.decompressobj()
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._error as error:
                raise OSError(f"not valid zstd: {error}") from error
            self._input = b""
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count
