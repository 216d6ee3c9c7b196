"""Results as files: what was measured, and everything needed to measure it again.

A result is one JSON file per task, model and setting, named by a hash of these behind the model's
name. The same command takes what is there and measures the rest.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..files import write_whole
from .subject import Subject

#: Raised when the code comes to measure something else: older results are measured again.
FORMAT = 1


class Records:
    """The results of one task in a folder."""

    def __init__(self, folder: Path, task: str):
        self.folder, self.task = folder / task, task

    def measured(
        self,
        subject: Subject,
        setting: dict[str, Any],
        measure: Callable[[], dict[str, Any]],
        note: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The record of this model in this setting: read if it is there, else measured and kept.

        `setting` holds all that the result depends on beside the model: options, seed, data hash.
        `note` is recorded, but does not tell results apart: where data came from, for instance.
        """
        return self.kept(
            subject.name, _identity(subject), subject.about, setting, measure, note=note
        )

    def kept(
        self,
        name: str,
        identity: dict[str, Any],
        about: dict[str, Any],
        setting: dict[str, Any],
        measure: Callable[[], dict[str, Any]],
        note: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The same for what is no Subject: `identity` tells models apart, `about` is recorded.

        A result is found under any name, and is returned with the name and the note of today.

        Raises:
            ValueError: the folder cannot be written, which is tried before measuring.
        """
        mark = self._mark(identity, setting)
        today = json.loads(json.dumps({"model": about, "note": note or {}}))
        there = self._find(mark)
        if there is not None:
            return {**_read(there), **today}
        check_writable(self.folder, self.folder.parent)
        made_by = provenance()
        start = time.monotonic()
        result = measure()
        record = {
            "format": FORMAT,
            "task": self.task,
            **today,
            "setting": setting,
            "result": result,
            "seconds": round(time.monotonic() - start, 2),
            "made_by": made_by,
        }
        content = json.dumps(record, indent=1) + "\n"
        write_whole(self.folder / f"{slug(name)}-{mark}.json", content.encode())
        return json.loads(content)  # as it will be read

    def file_of(self, subject: Subject, setting: dict[str, Any]) -> Path | None:
        """Where the record is, maybe under another name of the model; None if there is none."""
        return self._find(self._mark(_identity(subject), setting))

    def _mark(self, identity: dict[str, Any], setting: dict[str, Any]) -> str:
        key = {"format": FORMAT, "task": self.task, "setting": setting, "model": identity}
        return digest(key)

    def _find(self, mark: str) -> Path | None:
        return min(self.folder.glob(f"*-{mark}.json"), default=None)

    def all(self) -> list[dict[str, Any]]:
        """Every record of this format in the folder, whoever wrote it."""
        found = [_read(path) for path in sorted(self.folder.glob("*.json"))]
        return [record for record in found if record.get("format") == FORMAT]


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


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged, delete it to measure again: {error}") from error


def provenance() -> dict[str, Any]:
    """Versions, and the commit if this is a checkout."""
    import transformers

    return {
        "trellis": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def _identity(subject: Subject) -> dict[str, Any]:
    """All of a model that a result may depend on; not its name, nor where it is."""
    names = ("weights_sha256", "config_sha256", "tokenizer_sha256", "start", "end")
    return {name: subject.about[name] for name in names}


def digest(key: Any, length: int = 12) -> str:
    """Names a file by what it depends on."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:length]


def slug(name: str) -> str:
    """A model's name as part of a file's."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-") or "model"


def _commit() -> str | None:
    """None where this file is not one of a checkout of this project, or there is no git."""
    own = Path(__file__)
    tracked = _git("ls-files", "--full-name", "--error-unmatch", own.name)
    if tracked != f"src/trellis/{own.parent.name}/{own.name}":
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(*arguments: str) -> str | None:
    try:
        out = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:
        return None
    return out.stdout.strip() if out.returncode == 0 else None
