"""Documents out of byte streams: plain text, jsonl, and tar archives of both.

All readers yield events in a fixed order: a `Piece` of a document, a `Skip` for an input that
cannot be read, or `Ignored` for a file of a kind that is not text. Nothing is dropped without an
event.
"""

from __future__ import annotations

import codecs
import itertools
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from ..files import parse_json
from .compression import READ_ERRORS, SUFFIXES, check_available, decompressed
from .pieces import last_cut

#: Files with more bytes are streamed in pieces; lines of jsonl with more bytes are skipped.
LONG = 64 << 20
#: Bytes of text in a piece of a document that is streamed.
STREAM_PIECE = 8 << 20

#: The kind of a file by its suffix. Files named .json are read if their lines are objects.
_KINDS = {".tar": "tar", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json"}
_TEXT = """
    .txt .text .md .markdown .rst .tex .org .adoc .html .htm .xml .css .py .pyi .pyx .c .h .cc
    .cpp .cxx .hh .hpp .hxx .cu .cuh .m .mm .java .kt .kts .scala .groovy .go .rs .zig .swift .js
    .mjs .cjs .jsx .ts .tsx .vue .svelte .rb .php .pl .pm .lua .r .jl .sh .bash .zsh .fish .ps1
    .bat .sql .hs .ml .mli .fs .fsx .clj .cljs .lisp .el .scm .rkt .erl .ex .exs .dart .cs .vb .f
    .f90 .f95 .for .pas .ada .adb .ads .asm .s .v .sv .vhd .vhdl .lean .agda .proto .thrift
    .graphql .cmake .mk .toml .yaml .yml .ini .cfg .tcl .awk .sed .nim .d .sol
"""
_KINDS |= dict.fromkeys(_TEXT.split(), "text")


@dataclass(frozen=True)
class Piece:
    """The text of a document, or a part of the text of a long one."""

    name: str
    text: str
    size: int  # bytes of the text in UTF-8
    last: bool  # nothing more of this document follows


@dataclass(frozen=True)
class Skip:
    """An input that could not be read; it is listed in skipped.jsonl."""

    name: str
    category: str  # one of the constants below, for counting
    detail: str = ""

    @property
    def reason(self) -> str:
        return f"{self.category}: {self.detail}" if self.detail else self.category


@dataclass(frozen=True)
class Ignored:
    """A file that is not read because of its kind: its suffix, "(no suffix)" or "(hidden)".

    Folders that are not entered are of the kinds "(hidden)", "(link)" and "(corpus)".
    """

    kind: str


Event = Piece | Skip | Ignored

#: Categories of skipped inputs.
EMPTY = "empty"
NOT_UTF8 = "not UTF-8"
BINARY = "binary (NUL bytes)"
UNREADABLE = "unreadable"
NOT_REGULAR = "not a regular file"
BAD_JSON = "bad JSON"
NOT_JSONL = "not JSON lines"
NO_TEXT = "no text"


@dataclass(frozen=True)
class Form:
    """How a file is read."""

    kind: str | None  # "text", "jsonl", "json", "tar"; None if the suffix is not known
    compression: str | None  # "gz", "xz", "bz2", "zst"
    suffix: str  # of both, such as ".txt.gz"


def form_of(name: str) -> Form:
    """The form of a file, by its name."""
    base = os.path.basename(name).lower()
    for short in (".tgz", ".txz", ".tbz2", ".tzst"):
        if base.endswith(short):
            return Form("tar", short[2:], short)
    stem, last = os.path.splitext(base)
    compression = SUFFIXES.get(last)
    if compression is None:
        stem, last = base, ""
    suffix = os.path.splitext(stem)[1]
    return Form(_KINDS.get(suffix), compression, suffix + last or "(no suffix)")


def hidden(path: str) -> bool:
    """Whether a relative path is hidden (.name), or lies in a hidden folder or in __pycache__."""
    parts = path.replace(os.sep, "/").split("/")
    return any((p.startswith(".") and p not in (".", "..")) or p == "__pycache__" for p in parts)


def read_text(stream: IO[bytes], name: str) -> Iterator[Event]:
    """A stream as one document. A long one is streamed, and ends where it cannot be read."""
    try:
        data = stream.read(LONG + 1)
    except READ_ERRORS as error:
        yield Skip(name, UNREADABLE, _what(error))
        return
    if len(data) > LONG:
        yield from _stream_text(stream, name, data)
    elif b"\0" in data:
        yield Skip(name, BINARY)
    else:
        try:
            yield whole_text(data.decode("utf-8-sig"), name)
        except UnicodeDecodeError as error:
            yield Skip(name, NOT_UTF8, f"{error.reason} at byte {error.start}")


def whole_text(text: str, name: str) -> Event:
    """A document of one piece; a Skip if the text is empty or is not valid Unicode."""
    if not text or text.isspace():
        return Skip(name, EMPTY)
    try:
        return Piece(name, text, len(text.encode()), last=True)
    except UnicodeEncodeError as error:
        return Skip(name, NOT_UTF8, f"{error.reason} at character {error.start}")


def _stream_text(stream: IO[bytes], name: str, data: bytes) -> Iterator[Event]:
    """A long text in pieces. `data` is its first block."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    held, done, started = "", 0, False  # text to yield, bytes decoded, whether a piece was yielded
    trouble: Skip | None = None
    while trouble is None:
        zero = data.find(b"\0")
        try:
            held += decoder.decode(data if zero < 0 else data[:zero], final=not data)
            if zero >= 0:
                trouble = Skip(name, BINARY, f"at byte {done + zero}")
        except UnicodeDecodeError as error:
            # The error's bytes begin with those that the decoder kept from the block before.
            held += error.object[: error.start].decode()
            at = done + len(data) - (len(error.object) - error.start)
            trouble = Skip(name, NOT_UTF8, f"{error.reason} at byte {at}")
        if not data or trouble is not None:
            break
        done += len(data)
        data = b""  # lets this block go before the next one is read
        while len(held) > STREAM_PIECE:
            place = last_cut(held[:STREAM_PIECE])
            text, held = held[:place], held[place:]
            yield Piece(name, text, len(text.encode()), last=False)
            started = True
        try:
            data = stream.read(STREAM_PIECE)
        except READ_ERRORS as error:
            trouble = Skip(name, UNREADABLE, f"{_what(error)} after byte {done}")
    if trouble is None or started:
        yield Piece(name, held, len(held.encode()), last=True)
    if trouble is not None:
        detail = f"{trouble.detail}; the document ends there" if started else trouble.detail
        yield Skip(name, trouble.category, detail)


def read_jsonl(stream: IO[bytes], name: str, text_field: str, sure: bool = True) -> Iterator[Event]:
    """One document for each line, named file:line. Blank lines are left out.

    sure: the file is known to be jsonl. If not, all of it is skipped unless the first line that is
    not blank is an object.
    """
    for number in itertools.count(1):
        here = f"{name}:{number}"
        try:
            line = stream.readline(LONG + 1)
            if len(line) > LONG and not line.endswith(b"\n"):
                line = b""
                while (rest := stream.readline(LONG)) and not rest.endswith(b"\n"):
                    pass
                yield Skip(here, BAD_JSON, f"the line is longer than {LONG:,} bytes")
                continue
        except READ_ERRORS as error:
            yield Skip(here, UNREADABLE, f"{_what(error)}; nothing is read from here on")
            return
        if not line:
            return
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.isspace():
            continue
        try:
            row = parse_json(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            row = Skip(here, NOT_UTF8, f"{error.reason} at byte {error.start}")
        except ValueError as error:
            row = Skip(here, BAD_JSON, str(error))
        if not (sure := sure or isinstance(row, dict)):
            yield Skip(name, NOT_JSONL, "the first line is not an object by itself")
            return
        yield row if isinstance(row, Skip) else row_event(row, here, text_field)


def row_event(row: object, name: str, text_field: str) -> Event:
    """The document in a row of jsonl or of a dataset, or a Skip."""
    if not isinstance(row, dict):
        return Skip(name, NO_TEXT, f"the line is a {type(row).__name__}, not an object")
    if text_field not in row:
        return Skip(name, NO_TEXT, f"no field {text_field!r}")
    text = row[text_field]
    if not isinstance(text, str):
        return Skip(name, NO_TEXT, f"field {text_field!r} is a {type(text).__name__}, not a string")
    return whole_text(text, name)


def read_tar(stream: IO[bytes], name: str, text_field: str) -> Iterator[Event]:
    """The members of an archive in its order, each read like a file of a folder."""
    count = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 20) as archive:
            for member in archive:
                count += 1
                archive.members = []  # type: ignore[attr-defined]  # else every header is kept
                if not member.isdir():
                    yield from _read_member(archive, member, name, text_field)
    except READ_ERRORS as error:
        # The count tells how far the archive was read; tarfile calls an empty file an error too.
        yield Skip(name, UNREADABLE, f"{_what(error)}; the archive ends after {count} members")


def _read_member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, name: str, text_field: str
) -> Iterator[Event]:
    form, name = form_of(member.name), f"{name}:{member.name}"
    if hidden(member.name):
        yield Ignored("(hidden)")
    elif member.issym() or member.islnk():
        kind = "symbolic" if member.issym() else "hard"
        yield Skip(name, NOT_REGULAR, f"{kind} link to {member.linkname}")
    elif not member.isfile():
        yield Skip(name, NOT_REGULAR, "FIFO" if member.isfifo() else "device")
    elif form.kind is None or form.kind == "tar":
        yield Ignored(form.suffix)
    else:
        file = archive.extractfile(member)
        assert file is not None  # it is a regular file
        yield from read_form(file, name, form, text_field)


def read_form(file: IO[bytes], name: str, form: Form, text_field: str) -> Iterator[Event]:
    """The documents of an open file. A file whose suffix is not known is read as text."""
    try:
        check_available(form.compression, name)
    except ModuleNotFoundError as error:  # a member of an archive; files are checked when listed
        yield Skip(name, UNREADABLE, str(error))
        return
    stream = decompressed(file, form.compression)
    if form.kind == "tar":
        yield from read_tar(stream, name, text_field)
    elif form.kind in ("jsonl", "json"):
        yield from read_jsonl(stream, name, text_field, sure=form.kind == "jsonl")
    else:
        yield from read_text(stream, name)


def _what(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
