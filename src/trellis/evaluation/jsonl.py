"""Files of one JSON value a line, plain or compressed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..data.compression import READ_ERRORS, check_available, decompressed
from ..data.documents import form_of

#: Values with where they stand, for errors.
Rows = Iterator[tuple[str, Any]]


def read_text(path: Path) -> str:
    """A file's text, without a byte order mark.

    Raises:
        ValueError: it cannot be decompressed, or is not UTF-8.
    """
    compression = form_of(path.name).compression
    check_available(compression, str(path))
    try:
        with path.open("rb") as file:
            return decompressed(file, compression).read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    except READ_ERRORS as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers.

    Only "\\n" ends a line: others, such as U+2028, may stand inside a string.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line


def rows(text: str, source: str) -> Rows:
    """The values of a text's lines, each with source:line.

    Raises:
        ValueError: a line is not JSON.
    """
    for number, line in lines(text):
        where = f"{source}:{number}"
        try:
            yield where, json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: this is not JSON: {error}") from error
