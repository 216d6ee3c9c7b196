"""The loop of every task: measure what is missing, keep it as files, and report it.

A task says in a `Job` what one measurement depends on and how it is made. The result is one JSON
file for each model and setting, whose name ends in a hash of both, such as
`runs/eval/ppl/gpt2-context-512-1f0c3a5b7d9e.json`. The same command takes the results that are
there and measures the rest. Tasks return a `Report`; only the command prints it.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import __version__
from ..data.compression import READ_ERRORS, check_available, decompressed
from ..data.documents import form_of
from ..files import parse_json, write_whole
from .scoring import Progress

#: The version of results. It goes up when a task comes to measure something else, so that older
#: results are measured again.
FORMAT = 1

Record = dict[str, Any]
#: An EvaluatedModel, or anything with a `name`, an `identity` that tells models apart, and facts
#: `about` it for the record.
Model = Any
#: Values with the place where they stand, such as "items.jsonl:3", for errors.
Rows = Iterator[tuple[str, Any]]


class Job(NamedTuple):
    """One measurement of a model.

    setting: all that the result depends on beside the model: options, seed, hash of the data.
    measure: called with `progress=`; gives the result.
    label: names the measurement in the progress bar and in the file's name, such as "context 512".
    total: items that `progress` counts; None shows no bar.
    note: recorded, but results with different notes are the same: for instance the data's path.
    """

    setting: dict[str, Any]
    measure: Callable[..., dict[str, Any]]
    label: str
    total: int | None = None
    note: dict[str, Any] | None = None


class Table(NamedTuple):
    """A table for the terminal: a title, the heads of its columns, and its rows."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[object]]


class Report(NamedTuple):
    """What a task found.

    found: its records, or the table of numbers that it wrote.
    shown: tables and lines that the command prints, in this order.
    files: figures and other files beside the records.
    """

    found: Any
    shown: list[Table | str]
    files: list[Path]


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Progress]:
    """Yields a function that moves a progress bar on.

    The bar is shown on terminals only, and not where the total is None.
    """
    if total is None:  # rich is not needed then
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    label = TextColumn("{task.description}", markup=False)
    columns = (label, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


class Records:
    """The results of one task, in a folder of its name."""

    def __init__(self, folder: Path, task: str):
        self.folder, self.task = folder / task, task

    def measure(
        self, models: Iterable[Model], jobs: Callable[[Any], Sequence[Job]]
    ) -> list[list[Record]]:
        """The records of every model, one for each of its jobs.

        jobs: gives the measurements of a model. It raises where one of them is not possible, before
            the first of them is made.
        """
        return [[self.measured(model, job) for job in jobs(model)] for model in models]

    def measured(self, model: Model, job: Job) -> Record:
        """The record of a measurement: read if it is there, else measured and written.

        The record of a model that has been renamed since is found as well; the name and the note of
        what is returned are the present ones.
        Raises ValueError, before measuring, if the folder cannot be written or a file is damaged.
        """
        today = json.loads(json.dumps({"model": model.about, "note": job.note or {}}))
        there = self.file_of(model, job.setting)
        if there is not None:
            return {**_read(there), **today}
        check_writable(self.folder, self.folder.parent)
        made_by = provenance()
        start = time.monotonic()
        with progress(f"{model.name}, {job.label}", job.total) as advance:
            result = job.measure(progress=advance)
        record = {
            "format": FORMAT,
            "task": self.task,
            **today,
            "setting": job.setting,
            "result": result,
            "seconds": round(time.monotonic() - start, 2),
            "made_by": made_by,
        }
        content = json.dumps(record, indent=1) + "\n"
        name = f"{slug(f'{model.name} {job.label}')}-{self._mark(model, job.setting)}.json"
        write_whole(self.folder / name, content.encode())
        return json.loads(content)  # as it will be read

    def file_of(self, model: Model, setting: dict[str, Any]) -> Path | None:
        """The file of a record, which may bear another name of the model; None if there is none."""
        return min(self.folder.glob(f"*-{self._mark(model, setting)}.json"), default=None)

    def all(self) -> list[Record]:
        """Every record of today's format in the folder, whichever process wrote it."""
        found = [_read(path) for path in sorted(self.folder.glob("*.json"))]
        return [record for record in found if record.get("format") == FORMAT]

    def _mark(self, model: Model, setting: dict[str, Any]) -> str:
        key = {"format": FORMAT, "task": self.task, "setting": setting, "model": model.identity}
        return digest(key)


def check_writable(folder: Path, out: Path) -> None:
    """Makes a folder at or below `out`. Raises ValueError if files cannot be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"--out must be a folder that can be written; got {out}: {error}"
        ) from error


def _read(path: Path) -> Record:
    try:
        return parse_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged, delete it to measure again: {error}") from error


def digest(key: Any, length: int = 12) -> str:
    """A short hash of plain values, for the name of a file that depends on them."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:length]


def hash_of(texts: Iterable[str]) -> str:
    """sha256 of a list of texts, by which a result says what it was measured on."""
    found = hashlib.sha256()
    for text in texts:
        data = text.encode()
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.hexdigest()


def slug(name: str) -> str:
    """A name as part of a file's name: "gpt2, passkey, 1024" becomes "gpt2-passkey-1024"."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-") or "model"


def provenance() -> dict[str, Any]:
    """The versions that made a result, and the commit if this is a checkout."""
    import transformers

    return {
        "trellis": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def _commit() -> str | None:
    """None where there is no git, or where this file does not belong to a checkout of ours."""
    own = Path(__file__)

    def git(*arguments: str) -> str:
        return subprocess.check_output(
            ["git", *arguments], cwd=own.parent, stderr=subprocess.DEVNULL, text=True
        ).strip()

    try:
        tracked = git("ls-files", "--full-name", "--error-unmatch", own.name)
        if tracked == f"src/trellis/{own.parent.name}/{own.name}":
            return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        pass
    return None


def read_text(path: Path) -> str:
    """The text of a file of items, plain or compressed, without a byte order mark."""
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

    Only "\\n" ends a line: other separators, such as U+2028, may stand inside a JSON string.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line


def json_rows(text: str, source: str) -> Rows:
    """The JSON value of each line of a text, with its place, "source:line"."""
    for number, line in lines(text):
        where = f"{source}:{number}"
        try:
            yield where, parse_json(line)
        except ValueError as error:
            raise ValueError(f"{where}: this is not JSON: {error}") from error
