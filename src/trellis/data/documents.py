"""Documents out of byte streams: plain text, jsonl, and tar archives of both.

Everything here yields events in a fixed order: a `Piece` of a document, a `Skip` for what cannot be
read, or `Ignored` for what is not meant to be. Nothing is dropped without an event.
"""

from __future__ import annotations

import codecs
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from .compression import READ_ERRORS, SUFFIXES, check_available, decompressed
from .pieces import last_cut

#: Text beyond this many bytes is streamed; so is the limit of one line of jsonl.
LONG = 64 << 20
#: Bytes of text in a piece of a document that is streamed.
STREAM_PIECE = 8 << 20

JSONL_SUFFIXES = (".jsonl", ".ndjson")
#: Of one value, or of one object in each line: the first line tells.
JSON_SUFFIX = ".json"
_TEXT = """
    .txt .text .md .markdown .rst .tex .org .adoc .html .htm .xml .css .py .pyi .pyx .c .h .cc
    .cpp .cxx .hh .hpp .hxx .cu .cuh .m .mm .java .kt .kts .scala .groovy .go .rs .zig .swift .js
    .mjs .cjs .jsx .ts .tsx .vue .svelte .rb .php .pl .pm .lua .r .jl .sh .bash .zsh .fish .ps1
    .bat .sql .hs .ml .mli .fs .fsx .clj .cljs .lisp .el .scm .rkt .erl .ex .exs .dart .cs .vb .f
    .f90 .f95 .for .pas .ada .adb .ads .asm .s .v .sv .vhd .vhdl .lean .agda .proto .thrift
    .graphql .cmake .mk .toml .yaml .yml .ini .cfg .tcl .awk .sed .nim .d .sol
"""
TEXT_SUFFIXES = frozenset(_TEXT.split())


@dataclass(frozen=True)
class Piece:
    """Text of a document, or a part of the text of a long one."""

    name: str
    text: str
    size: int  # bytes of the text in UTF-8
    last: bool  # nothing more of this document follows


@dataclass(frozen=True)
class Skip:
    """Something that was left out."""

    name: str
    category: str  # for counting
    detail: str = ""

    @property
    def reason(self) -> str:
        return f"{self.category}: {self.detail}" if self.detail else self.category


@dataclass(frozen=True)
class Ignored:
    """A file of a kind that is not read; counted by its suffix, or by what else it is."""

    suffix: str


HIDDEN = Ignored("(hidden)")
LINK = Ignored("(link)")
SPECIAL = Ignored("(device or pipe)")
CORPUS = Ignored("(corpus)")


def ignored_by(form: Form) -> Ignored:
    return Ignored(form.suffix or "(no suffix)")


Event = Piece | Skip | Ignored

EMPTY = "empty"
NOT_UTF8 = "not UTF-8"
BINARY = "binary (NUL bytes)"
UNREADABLE = "unreadable"
BAD_JSON = "bad JSON"
NOT_JSONL = "not JSON lines"
NO_TEXT = "no text"


@dataclass(frozen=True)
class Form:
    """How a file is to be read."""

    kind: str | None  # "text", "jsonl", "json", "tar"; None if its suffix is not known
    compression: str | None
    suffix: str


def form_of(name: str) -> Form:
    """The form that a file's name tells."""
    base = os.path.basename(name).lower()
    for short in (".tgz", ".txz", ".tbz2", ".tzst"):
        if base.endswith(short):
            return Form("tar", short[2:], short)
    stem, last = os.path.splitext(base)
    compression = SUFFIXES.get(last)
    if compression is not None:
        base = stem
    suffix = os.path.splitext(base)[1]
    if suffix == ".tar":
        kind: str | None = "tar"
    elif suffix in JSONL_SUFFIXES:
        kind = "jsonl"
    elif suffix == JSON_SUFFIX:
        kind = "json"
    else:
        kind = "text" if suffix in TEXT_SUFFIXES else None
    return Form(kind, compression, suffix + last if compression else suffix)


def hidden(path: str) -> bool:
    """Whether a relative path lies in a hidden or a cache folder, or is hidden itself."""
    parts = path.replace(os.sep, "/").split("/")
    return any((p.startswith(".") and p not in (".", "..")) or p == "__pycache__" for p in parts)


def read_text(stream: IO[bytes], name: str) -> Iterator[Event]:
    """A stream as one document. Long ones are streamed, and end where they turn unreadable."""
    try:
        data = stream.read(LONG + 1)
    except READ_ERRORS as error:
        yield Skip(name, UNREADABLE, _what(error))
        return
    if len(data) > LONG:
        yield from _stream_text(stream, name, data)
        return
    if b"\0" in data:
        yield Skip(name, BINARY)
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield Skip(name, NOT_UTF8, f"{error.reason} at byte {error.start}")
        return
    yield from whole_text(text, name)


def whole_text(text: str, name: str) -> Iterator[Event]:
    """A document of one piece, if it is one that can be written."""
    if not text or text.isspace():
        yield Skip(name, EMPTY)
        return
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        yield Skip(name, NOT_UTF8, f"{error.reason} at character {error.start}")
        return
    yield Piece(name, text, size, last=True)


def _stream_text(stream: IO[bytes], name: str, data: bytes) -> Iterator[Event]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    held = ""
    done = 0
    started = False
    trouble: Skip | None = None
    while trouble is None:
        zero = data.find(b"\0")
        try:
            held += decoder.decode(data if zero < 0 else data[:zero], final=not data)
        except UnicodeDecodeError as error:
            # Its bytes begin with those that the decoder held back from the block before.
            held += error.object[: error.start].decode()
            at = done + len(data) - (len(error.object) - error.start)
            trouble = Skip(name, NOT_UTF8, f"{error.reason} at byte {at}")
            break
        if zero >= 0:
            trouble = Skip(name, BINARY, f"at byte {done + zero}")
        if not data or trouble is not None:
            break
        done += len(data)
        data = b""  # or two blocks would be held
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
    """One document for each line; what is not one is named as file:line.

    sure: that these are lines of JSON; if not, the first one that is not blank must be an object.
    """
    number = 0
    while True:
        number += 1
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
        if not (sure := sure or _is_object(line)):
            yield Skip(name, NOT_JSONL, "the first line is not an object by itself")
            return
        yield _json_line(line, here, text_field)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _json_line(line: bytes, name: str, text_field: str) -> Event:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Skip(name, NOT_UTF8, f"{error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return Skip(name, BAD_JSON, str(error))
    return row_event(row, name, text_field)


def row_event(row: object, name: str, text_field: str) -> Event:
    """The document in a row of jsonl or of a dataset."""
    if not isinstance(row, dict):
        return Skip(name, NO_TEXT, f"the line is a {type(row).__name__}, not an object")
    if text_field not in row:
        return Skip(name, NO_TEXT, f"no field {text_field!r}")
    text = row[text_field]
    if not isinstance(text, str):
        return Skip(name, NO_TEXT, f"field {text_field!r} is a {type(text).__name__}, not a string")
    return next(whole_text(text, name))


def read_tar(stream: IO[bytes], name: str, text_field: str) -> Iterator[Event]:
    """The members of an archive, in its order, each like a file of a folder."""
    count = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 20) as archive:
            for member in archive:
                count += 1
                archive.members = []  # type: ignore[attr-defined]  # or it would keep every header
                if not member.isdir():
                    yield from _read_member(archive, member, name, text_field)
    except READ_ERRORS as error:
        # An empty file is an error for tarfile; the count tells how far an archive was read.
        yield Skip(name, UNREADABLE, f"{_what(error)}; the archive ends after {count} members")


def _read_member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, name: str, text_field: str
) -> Iterator[Event]:
    form = form_of(member.name)
    if hidden(member.name):
        yield HIDDEN
    elif member.issym() or member.islnk():
        yield LINK
    elif not member.isfile():
        yield SPECIAL
    elif form.kind is None or form.kind == "tar":
        yield ignored_by(form)
    else:
        file = archive.extractfile(member)
        assert file is not None  # it is a regular file
        yield from read_form(file, f"{name}:{member.name}", form, text_field)


def read_form(file: IO[bytes], name: str, form: Form, text_field: str) -> Iterator[Event]:
    """The documents of an open file; a suffix that is not known is read as text."""
    try:
        check_available(form.compression, name)
    except ModuleNotFoundError as error:  # inside an archive, where it could not be known before
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
