"""What the user names as a source, as an ordered list of units to be read one by one."""

from __future__ import annotations

import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from . import stdlib
from .compression import check_available, optional
from .documents import (
    CORPUS,
    EMPTY,
    HIDDEN,
    LINK,
    UNREADABLE,
    Event,
    Form,
    Piece,
    Skip,
    form_of,
    hidden,
    ignored_by,
    read_form,
    row_event,
)
from .shards import is_corpus

HUB = "hub:"
STDLIB = "stdlib"
#: Kinds of ignored files that are named.
_KINDS = 10

_PLAIN = Form("text", None, "")


@dataclass(frozen=True)
class Unit:
    """A file, a dataset of the hub, or something that cannot be read."""

    kind: str  # "file", "hub", "documentation", "unreadable"
    name: str  # as documents are named after it
    path: str = ""
    form: Form = _PLAIN
    size: int = 0
    modified: int = 0  # nanoseconds
    reason: str = ""

    def identity(self) -> list[Any]:
        """What must not change between an interrupted run and its continuation."""
        return [self.kind, self.name, self.size, self.modified]


@dataclass
class Listing:
    """The units of some sources, in order, and what was left out by its name alone."""

    units: list[Unit] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    sources: list[dict[str, Any]] = field(default_factory=list)

    @property
    def size(self) -> int | None:
        """Bytes on disk of all units; None if a dataset of the hub is among them."""
        if any(unit.kind == "hub" for unit in self.units):
            return None
        return sum(unit.size for unit in self.units)


class Meter:
    """How far the file that is being read has been read."""

    def __init__(self) -> None:
        self.file: IO[bytes] | None = None

    def position(self) -> int:
        try:
            return 0 if self.file is None else self.file.tell()
        except (ValueError, OSError):  # closed, or not seekable
            return 0


def list_sources(sources: Sequence[str | Path], leave_out: Sequence[Path] = ()) -> Listing:
    """The units of `sources`; folders in `leave_out` (the output) are not entered.

    Raises FileNotFoundError if a source does not exist, ValueError if there is none or it has no
    known form, and ModuleNotFoundError if one needs a package that is not installed.
    """
    if not sources:
        raise ValueError("no source was given: name a file, a folder, hub:<dataset> or stdlib")
    listing = Listing()
    outputs = {os.path.realpath(path) for path in leave_out}
    for source in map(str, sources):
        first = len(listing.units)
        entry: dict[str, Any] = {"source": source}
        if source == STDLIB:
            _list_stdlib(listing)
            entry["python"] = sys.version.split()[0]
        elif source.startswith(HUB):
            parse_hub(source)
            optional("datasets", source)
            listing.units.append(Unit("hub", source))
        elif os.path.isdir(source):
            _list_folder(source, listing, outputs)
        elif os.path.exists(source):
            form = form_of(source)
            # A file that is named is meant, whatever its suffix.
            form = Form(form.kind or "text", form.compression, form.suffix)
            listing.units.append(_file_unit(source, source, form))
        else:
            raise FileNotFoundError(
                f"source {source!r} does not exist: name a file, a folder, hub:<dataset> or stdlib"
            )
        units = listing.units[first:]
        entry["files"] = sum(unit.kind == "file" for unit in units)
        entry["bytes"] = sum(unit.size for unit in units)
        listing.sources.append(entry)
    for unit in listing.units:
        check_available(unit.form.compression, unit.name)
    return listing


def parse_hub(source: str) -> tuple[str, str | None, str]:
    """`hub:name[:config][@split]` as name, config, split. Raises ValueError if there is no name."""
    rest, _, split = source.removeprefix(HUB).partition("@")
    name, _, config = rest.partition(":")
    if not name:
        raise ValueError(f"source {source!r} must be hub:<dataset>[:<config>][@<split>]")
    return name, config or None, split or "train"


def read_unit(unit: Unit, text_field: str, meter: Meter) -> Iterator[Event]:
    """The events of one unit, in an order that never changes."""
    if unit.kind == "unreadable":
        yield Skip(unit.name, UNREADABLE, unit.reason)
    elif unit.kind == "documentation":
        yield from stdlib.documentation()
    elif unit.kind == "hub":
        yield from _read_hub(unit.name, text_field)
    else:
        try:
            file = open(unit.path, "rb")  # noqa: SIM115 - closed below
        except OSError as error:
            yield Skip(unit.name, UNREADABLE, error.strerror or str(error))
            return
        with file:
            meter.file = file
            yield from read_form(file, unit.name, unit.form, text_field)
        meter.file = None


def whole_texts(sources: Sequence[str | Path], text_field: str = "text") -> Iterator[str]:
    """The documents of `sources`, each as one text; empty ones are left out.

    Raises ValueError if one cannot be read, and what `list_sources` raises.
    """
    for unit in list_sources(sources).units:
        parts: list[str] = []
        for event in read_unit(unit, text_field, Meter()):
            if isinstance(event, Skip) and event.category != EMPTY:
                raise ValueError(f"{event.name} cannot be used: {event.reason}")
            if isinstance(event, Piece):
                parts.append(event.text)
                if event.last:
                    yield "".join(parts)
                    parts = []


def no_documents(
    sources: Sequence[str | Path], first: Sequence[Skip], count: int, ignored: Counter[str]
) -> str:
    """Why there is nothing to read: the first of `count` skipped inputs, and what was ignored."""
    lines = [f"no document was found in {', '.join(printable(source) for source in sources)}"]
    lines += [f"  skipped {printable(skip.name)}: {skip.reason}" for skip in first]
    if count > len(first):
        lines.append(f"  and {count - len(first)} more")
    if ignored:
        lines.append(f"  ignored {kinds(ignored)}")
    return "\n".join(lines)


def kinds(ignored: Counter[str]) -> str:
    """What was ignored, by kind: the ten most frequent, and how many others."""
    most = ignored.most_common(_KINDS)
    parts = [f"{count:,} {printable(kind)}" for kind, count in most]
    others = ignored.total() - sum(count for _, count in most)
    return ", ".join([*parts, f"{others:,} others"] if others else parts)


def printable(name: object) -> str:
    """A name for a terminal: what is no character, or moves the cursor, as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(name))


def _read_hub(source: str, text_field: str) -> Iterator[Event]:
    datasets = optional("datasets", source)
    name, config, split = parse_hub(source)
    number = 0
    try:
        for number, row in enumerate(
            datasets.load_dataset(name, config, split=split, streaming=True), start=1
        ):
            if number == 1 and text_field not in row:
                # Otherwise terabytes might be read for nothing.
                raise ValueError(
                    f"it has no field {text_field!r} but {', '.join(map(repr, row))}; "
                    "choose one with --text-field"
                )
            yield row_event(row, f"{source}:{number}", text_field)
    except GeneratorExit:
        raise
    except Exception as error:  # the library raises whatever its many backends raise
        raise ValueError(f"source {source!r} failed after row {number}: {error}") from error


def _list_stdlib(listing: Listing) -> None:
    root = stdlib.folder()
    for path in stdlib.source_files():
        name = f"{STDLIB}:{path}"
        listing.units.append(_file_unit(str(root / path), name, form_of(path)))
    listing.units.append(Unit("documentation", f"{STDLIB}:documentation"))


def _list_folder(source: str, listing: Listing, outputs: set[str]) -> None:
    def failed(error: OSError) -> None:
        name = error.filename or source
        listing.units.append(Unit("unreadable", name, reason=error.strerror or str(error)))

    for where, folders, files in os.walk(source, onerror=failed):
        if is_corpus(where):
            listing.ignored[CORPUS.suffix] += 1
            folders[:] = []
            continue
        entered = []
        for folder in sorted(folders):
            path = os.path.join(where, folder)
            if hidden(folder):
                listing.ignored[HIDDEN.suffix] += 1
            elif os.path.islink(path):
                listing.ignored[LINK.suffix] += 1
            elif os.path.realpath(path) not in outputs:
                entered.append(folder)
        folders[:] = entered
        for file in sorted(files):
            path = os.path.join(where, file)
            form = form_of(file)
            if hidden(file):
                listing.ignored[HIDDEN.suffix] += 1
            elif form.kind is None:
                listing.ignored[ignored_by(form).suffix] += 1
            else:
                listing.units.append(_file_unit(path, path, form))


def _file_unit(path: str, name: str, form: Form) -> Unit:
    try:
        status = os.stat(path)
    except OSError as error:  # a link that leads nowhere, or no permission
        return Unit("unreadable", name, reason=error.strerror or str(error))
    if not stat.S_ISREG(status.st_mode):
        return Unit("unreadable", name, reason="not a regular file")
    return Unit("file", name, path, form, status.st_size, status.st_mtime_ns)
