"""The sources that a user names, as an ordered list of units that are read one by one.

A source is a file, a folder, `hub:DATASET` (the Hugging Face hub) or `stdlib`: the sources and the
language reference of the Python that runs this, a text that every machine has.
"""

from __future__ import annotations

import importlib
import os
import re
import stat
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .compression import check_available, optional
from .documents import (
    EMPTY,
    NOT_REGULAR,
    UNREADABLE,
    Event,
    Ignored,
    Piece,
    Skip,
    form_of,
    hidden,
    read_form,
    row_event,
    whole_text,
)
from .shards import is_corpus

HUB = "hub:"
STDLIB = "stdlib"
#: How many kinds of ignored files a message names.
_KINDS = 10
#: How many skipped inputs an error names.
_NAMED = 5
#: Where the files of a dataset may lie, besides the folder that the source names.
_REMOTE = ("hf", "https", "http", "s3", "gs")

#: Folders of the standard library without text worth reading, or that differ between machines.
_STDLIB_LEFT_OUT = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "turtledemo",
    "_bundled", "lib-dynload", "pydoc_data", "lib2to3",
}  # fmt: skip
#: Files of the standard library that hold tables, or build settings of one machine.
_STDLIB_TABLES = re.compile(
    r"encodings/(cp\d+|iso8859_\d+|mac_\w+|koi8_\w|kz1048|ptcp154|palmos|hp_roman8|tis_620|aliases)\.py"
    r"|.*/?_sysconfigdata\w*\.py|html/entities\.py|token\.py|symbol\.py|.*_tables?\.py"
)


@dataclass(frozen=True)
class Unit:
    """A file, a dataset of the hub, or something that cannot be read."""

    kind: str  # "file", "hub", "documentation", "unreadable"
    name: str  # the beginning of the names of its documents
    path: str = ""
    size: int = 0
    modified: int = 0  # nanoseconds
    reason: str = ""  # why it cannot be read


@dataclass
class Listing:
    """The units of some sources, in order, and the files that are ignored because of their name."""

    units: list[Unit] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    sources: list[dict[str, Any]] = field(default_factory=list)

    @property
    def size(self) -> int | None:
        """The bytes of all units on disk; None if a dataset of the hub is among them."""
        if any(unit.kind == "hub" for unit in self.units):
            return None
        return sum(unit.size for unit in self.units)


@dataclass
class LeftOut:
    """Counts what is left out while the units of a listing are read."""

    listing: Listing
    on_skip: Callable[[Skip], None] | None = None
    skipped: Counter[str] = field(default_factory=Counter)  # by category
    ignored: Counter[str] = field(default_factory=Counter)  # members of archives, by suffix
    first: list[Skip] = field(default_factory=list)

    def add(self, event: Skip | Ignored) -> None:
        if isinstance(event, Ignored):
            self.ignored[event.kind] += 1
            return
        self.skipped[event.category] += 1
        if len(self.first) < _NAMED:
            self.first.append(event)
        if self.on_skip is not None:
            self.on_skip(event)

    def all_ignored(self) -> Counter[str]:
        return self.listing.ignored + self.ignored

    def no_documents(self) -> ValueError:
        """The error that says why the sources have no document."""
        sources = (printable(entry["source"]) for entry in self.listing.sources)
        lines = [f"no document was found in {', '.join(sources)}"]
        lines += [f"  skipped {printable(skip.name)}: {skip.reason}" for skip in self.first]
        if (more := self.skipped.total() - len(self.first)) > 0:
            lines.append(f"  and {more} more")
        if ignored := self.all_ignored():
            lines.append(f"  ignored {kinds(ignored)}")
        return ValueError("\n".join(lines))


class Meter:
    """Tells how far the file that is being read has been read."""

    file: IO[bytes] | None = None

    def position(self) -> int:
        return 0 if self.file is None or self.file.closed else self.file.tell()


def list_sources(sources: Sequence[str | Path], leave_out: Sequence[Path] = ()) -> Listing:
    """The units of `sources`. Folders in `leave_out` (the output of the run) are not entered.

    Raises FileNotFoundError if a source does not exist, ValueError if none is given or hub: has no
    name, and ModuleNotFoundError if a source needs a package that is not installed.
    """
    if not sources:
        raise ValueError("no source was given: name a file, a folder, hub:<dataset> or stdlib")
    listing = Listing()
    outputs = {os.path.realpath(path) for path in leave_out}
    for source in map(str, sources):
        first = len(listing.units)
        entry: dict[str, Any] = {"source": source}
        if source == STDLIB:
            root = Path(sysconfig.get_path("stdlib"))
            for path in stdlib_files(root):
                listing.units.append(_file_unit(str(root / path), f"{STDLIB}:{path}"))
            listing.units.append(Unit("documentation", f"{STDLIB}:documentation"))
            entry["python"] = sys.version.split()[0]
        elif source.startswith(HUB):
            parse_hub(source)
            optional("datasets", source)
            listing.units.append(Unit("hub", source))
        elif os.path.isdir(source):
            _list_folder(source, listing, outputs)
        elif os.path.exists(source):
            # Even if its suffix is not known: such a file is read as text.
            listing.units.append(_file_unit(source, source))
        else:
            raise FileNotFoundError(
                f"source {source!r} does not exist: name a file, a folder, hub:<dataset> or stdlib"
            )
        units = listing.units[first:]
        entry["files"] = sum(unit.kind == "file" for unit in units)
        entry["bytes"] = sum(unit.size for unit in units)
        listing.sources.append(entry)
    for unit in listing.units:
        check_available(form_of(unit.path).compression, unit.name)
    return listing


def stdlib_files(root: Path) -> list[str]:
    """The paths of the standard library's sources below its folder `root`, sorted."""
    found = []
    for where, folders, files in os.walk(root):
        folders[:] = (
            f for f in folders if f not in _STDLIB_LEFT_OUT and not f.startswith("config-")
        )
        paths = (Path(where, file).relative_to(root).as_posix() for file in files)
        found += [p for p in paths if p.endswith(".py") and not _STDLIB_TABLES.fullmatch(p)]
    return sorted(found)


def _list_folder(source: str, listing: Listing, outputs: set[str]) -> None:
    def failed(error: OSError) -> None:
        name = error.filename or source
        listing.units.append(Unit("unreadable", name, reason=error.strerror or str(error)))

    for where, folders, files in os.walk(source, onerror=failed):
        if is_corpus(where):
            listing.ignored["(corpus)"] += 1
            folders[:] = []
            continue
        entered = []
        for folder in sorted(folders):
            path = os.path.join(where, folder)
            if hidden(folder):
                listing.ignored["(hidden)"] += 1
            elif os.path.islink(path):
                listing.ignored["(link)"] += 1
            elif os.path.realpath(path) not in outputs:
                entered.append(folder)
        folders[:] = entered
        for file in sorted(files):
            path, form = os.path.join(where, file), form_of(file)
            if hidden(file) or form.kind is None:
                listing.ignored["(hidden)" if hidden(file) else form.suffix] += 1
            else:
                listing.units.append(_file_unit(path, path))


def _file_unit(path: str, name: str) -> Unit:
    try:
        status = os.stat(path)
    except OSError as error:  # a link that leads nowhere, or no permission
        return Unit("unreadable", name, reason=error.strerror or str(error))
    if not stat.S_ISREG(status.st_mode):
        return Unit("unreadable", name, reason="not a regular file")
    return Unit("file", name, path, status.st_size, status.st_mtime_ns)


def read_unit(unit: Unit, text_field: str, meter: Meter) -> Iterator[Event]:
    """The events of one unit, always in the same order."""
    if unit.kind == "unreadable":
        yield Skip(unit.name, UNREADABLE, unit.reason)
    elif unit.kind == "documentation":
        yield from stdlib_documentation()
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
            yield from read_form(file, unit.name, form_of(unit.path), text_field)
        meter.file = None


def stdlib_documentation() -> Iterator[Event]:
    """The language reference that pydoc shows, one document for each topic."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions of Python leave it out
        topics = {}
    for name in sorted(topics):
        yield whole_text(topics[name].strip() + "\n", f"{STDLIB}:topic/{name}")


def _read_hub(source: str, text_field: str) -> Iterator[Event]:
    number = 0
    try:
        for number, row in enumerate(open_hub(source), start=1):
            if number == 1 and text_field not in row:
                # An error at once: the dataset may have terabytes of such rows.
                raise ValueError(
                    f"it has no field {text_field!r} but {', '.join(map(repr, row))}; "
                    "choose one with --text-field"
                )
            yield row_event(row, f"{source}:{number}", text_field)
    except Exception as error:  # the library raises whatever its many backends raise
        raise ValueError(f"source {source!r} failed after row {number}: {error}") from error


def parse_hub(source: str) -> tuple[str, str | None, str]:
    """The name, the configuration and the split of `hub:name[:config][@split]`.

    Raises ValueError if there is no name.
    """
    rest, _, split = source.removeprefix(HUB).partition("@")
    name, _, config = rest.partition(":")
    if not name:
        raise ValueError(f"source {source!r} must be hub:<dataset>[:<config>][@<split>]")
    return name, config or None, split or "train"


def open_hub(source: str) -> Iterable[Any]:
    """The rows of `hub:name[:config][@split]`, streamed. The name may also be that of a folder.

    Raises ValueError if the dataset names files of this machine outside that folder.
    """
    name, config, split = parse_hub(source)
    builder = optional("datasets", source).load_dataset_builder(name, config)
    # A dataset's card may name any file, and names like `text` stand for the current folder.
    root = os.path.realpath(name) if os.path.isdir(name) else None
    for file in (file for files in (builder.config.data_files or {}).values() for file in files):
        protocol, separator, rest = file.rpartition("::")[2].partition("://")
        if separator and protocol in _REMOTE:
            continue
        path = os.path.realpath(rest if separator else file)
        if root is None or os.path.commonpath([root, path]) != root:
            raise ValueError(
                f"it would read {path}, a file of this machine that is not "
                f"{f'in the folder {root}' if root else 'on the hub'}; to read a local file, name "
                "its path as a source"
            )
    return builder.as_streaming_dataset(split=split)


def whole_texts(sources: Sequence[str | Path], text_field: str = "text") -> Iterator[str]:
    """The documents of `sources`, each as one text. Empty ones and links of archives are left out.

    Raises ValueError if a document cannot be read, and what `list_sources` raises.
    """
    for unit in list_sources(sources).units:
        parts: list[str] = []
        for event in read_unit(unit, text_field, Meter()):
            if isinstance(event, Skip) and event.category not in (EMPTY, NOT_REGULAR):
                raise ValueError(f"{event.name} cannot be used: {event.reason}")
            if isinstance(event, Piece):
                parts.append(event.text)
                if event.last:
                    yield "".join(parts)
                    parts = []


def kinds(ignored: Counter[str]) -> str:
    """Counts of ignored files, such as "13 .png, 2 (hidden)": the ten most frequent kinds."""
    most = ignored.most_common(_KINDS)
    parts = [f"{count:,} {printable(kind)}" for kind, count in most]
    others = ignored.total() - sum(count for _, count in most)
    return ", ".join([*parts, f"{others:,} others"] if others else parts)


def printable(name: object) -> str:
    """A name as a terminal can show it: other characters become escapes such as \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(name))
