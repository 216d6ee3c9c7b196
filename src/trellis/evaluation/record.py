"""Results as files: what was measured, and everything needed to measure it again.

A result is one JSON file per task, model and setting, named by a hash of these. The same command
takes what is there and measures the rest.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..files import write_whole
from .subject import Subject


class Records:
    """The results of one task in a folder."""

    def __init__(self, folder: Path, task: str):
        self.folder, self.task = folder / task, task

    def measured(
        self, subject: Subject, setting: dict[str, Any], measure: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """The record of this model in this setting: read if it is there, else measured and kept.

        `setting` holds all that the result depends on beside the model: options, seed, data hash.
        """
        identity = _identity(subject)
        return self.kept(subject.name, identity, subject.about, setting, measure)

    def kept(
        self,
        name: str,
        identity: dict[str, Any],
        about: dict[str, Any],
        setting: dict[str, Any],
        measure: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        """The same for what is no Subject: `identity` tells models apart, `about` is recorded."""
        key = {"task": self.task, "setting": setting, "model": identity}
        path = self.folder / f"{slug(name)}-{_digest(key)}.json"
        if path.is_file():
            return json.loads(path.read_text())
        start = time.monotonic()
        result = measure()
        record = {
            "task": self.task,
            "model": about,
            "setting": setting,
            "result": result,
            "seconds": round(time.monotonic() - start, 2),
            "made_by": provenance(),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(record, indent=1) + "\n").encode())
        return record

    def all(self) -> list[dict[str, Any]]:
        """Every record in the folder, whoever wrote it."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("*.json"))]


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
    return {name: subject.about[name] for name in ("weights_sha256", "tokenizer_sha256")}


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]


def slug(name: str) -> str:
    """A model's name as part of a file's."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-") or "model"


def _commit() -> str | None:
    folder = Path(__file__).parent
    out = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return out.stdout.strip() if out.returncode == 0 else None
