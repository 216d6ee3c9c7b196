"""What an interrupted `prepare_corpus` leaves behind, so that the same call can go on.

The output grows in the folder `OUT.partial`. The file `progress.json` in it records the arguments
of the run, how far the sources were read, and how much of every output file is valid; whatever was
written after that is cut off and written again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trellis

from ..files import lock, write_json
from .shards import FORMAT, PROGRESS_FILE, RANGE_HELD_OUT, SPLIT_LAYOUT, check_layout
from .sources import Listing
from .tokenizer import TextTokenizer, canonical


@dataclass
class ResumeState:
    """How far a run has come."""

    unit: int = 0  # index of the unit that the next event belongs to
    events_in_unit: int = 0  # how many events of that unit were written
    source_bytes: int = 0  # how much of the sources was read
    complete: bool = False  # all documents were written
    splits: dict[str, Any] = field(default_factory=dict)  # SplitWriter.state() of each split
    skipped_size: int = 0  # bytes of skipped.jsonl
    skipped: Counter[str] = field(default_factory=Counter)  # skipped inputs by category
    ignored: Counter[str] = field(default_factory=Counter)  # ignored members by suffix

    def save(self, folder: Path, arguments: dict[str, Any]) -> None:
        content = {"format": FORMAT, "arguments": arguments, **vars(self)}
        write_json(folder / PROGRESS_FILE, content)

    @classmethod
    def load(cls, folder: Path, arguments: dict[str, Any]) -> ResumeState | None:
        """The recorded state of an unfinished run; None if nothing was recorded.

        Raises ValueError if the record is damaged, or is of a run with other arguments.
        """
        path = folder / PROGRESS_FILE
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_bytes())
            check_layout(found, _LAYOUT)
            for name, split in found["splits"].items():
                check_layout(split, SPLIT_LAYOUT, name)
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged ({error}): remove {folder} to start anew"
            ) from error
        then, now = found["arguments"], json.loads(json.dumps(arguments))
        differences = [
            f"  {key}: {then.get(key)!r} then, {now.get(key)!r} now"
            for key in sorted({*then, *now})
            if then.get(key) != now.get(key)
        ]
        if differences:
            lines = "\n".join(differences)
            raise ValueError(
                f"{folder} is an unfinished run with other arguments or sources:\n{lines}\n"
                f"finish that run with its own arguments, or remove {folder} to start anew"
            )
        state = cls(**{name: found[name] for name in vars(cls())})
        state.skipped, state.ignored = Counter(state.skipped), Counter(state.ignored)
        return state


#: The layout of progress.json: the arguments, and the fields of ResumeState with their types.
_LAYOUT: dict[str, Any] = {"arguments": {}} | {
    name: {} if isinstance(value, dict) else type(value)
    for name, value in vars(ResumeState()).items()
}


def run_arguments(
    tokenizer: TextTokenizer, listing: Listing, options: dict[str, Any]
) -> dict[str, Any]:
    """Everything that must be the same when an interrupted run goes on."""
    units = [unit.identity() for unit in listing.units]
    return {
        "format_version": RANGE_HELD_OUT,
        "library_version": trellis.__version__,
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
        **options,
        "sources": [entry["source"] for entry in listing.sources],
        "units": {
            "count": len(units),
            "bytes": sum(unit.size for unit in listing.units),
            "sha256": hashlib.sha256(canonical(units)).hexdigest(),
        },
    }


@contextmanager
def unfinished_folder(partial: Path, out: Path) -> Iterator[bool]:
    """Makes `partial`, where `out` grows, or takes one that is there; other runs are locked out.

    Yields whether the folder is new. Raises FileExistsError if something else has that name.
    """
    is_new = False
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            partial.mkdir()
            is_new = True
        handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise type(error)(
            error.errno, f"{partial}, where {out} grows, cannot be written: {error.strerror}"
        ) from error
    try:
        lock(handle, f"another run is writing {partial}: wait for it, or stop it")
        if out.exists() or not partial.exists():  # another run has ended meanwhile
            raise FileExistsError(f"{out} exists and is not overwritten")
        # A run that was killed before its first record may have left a part of that file.
        if not (partial / PROGRESS_FILE).exists() and any(
            not path.name.startswith(f".{PROGRESS_FILE}.") for path in partial.iterdir()
        ):
            raise FileExistsError(
                f"{partial} exists and is no unfinished run (it has no {PROGRESS_FILE}): "
                "move it away, or choose another --out"
            )
        yield is_new
    finally:
        os.close(handle)
