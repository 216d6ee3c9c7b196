"""The corpus that every machine has: the interpreter's own standard library and documentation."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from .documents import Event, whole_text

#: Folders without prose or code worth reading, or that differ between installations.
_LEFT_OUT = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "turtledemo",
    "_bundled", "lib-dynload", "pydoc_data", "lib2to3",
}  # fmt: skip
#: Tables and build settings of one machine: not language, and pydoc's topics come as documentation.
_JUNK = re.compile(
    r"encodings/(cp\d+|iso8859_\d+|mac_\w+|koi8_\w|kz1048|ptcp154|palmos|hp_roman8|tis_620|aliases)\.py"
    r"|.*/?_sysconfigdata\w*\.py|html/entities\.py|token\.py|symbol\.py|.*_tables?\.py"
)


def folder() -> Path:
    """Where the standard library's sources are."""
    return Path(sysconfig.get_path("stdlib"))


def source_files() -> list[str]:
    """Paths of the library's sources, relative to `folder()`, sorted."""
    root = folder()
    found = []
    for where, folders, files in os.walk(root):
        folders[:] = sorted(
            f for f in folders if f not in _LEFT_OUT and not f.startswith("config-")
        )
        for file in files:
            path = Path(where, file).relative_to(root).as_posix()
            if path.endswith(".py") and not _JUNK.fullmatch(path):
                found.append(path)
    return sorted(found)


def documentation() -> Iterator[Event]:
    """The language reference that pydoc carries, then the docstrings of the built-in modules."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # left out by some distributions
        topics = {}
    for name in sorted(topics):
        yield from whole_text(topics[name].strip() + "\n", f"stdlib:topic/{name}")
    program = Path(__file__).with_name("builtin_docs.py")
    # Isolated, without site-packages: the same text whatever this process has imported.
    command = [sys.executable, "-I", "-S", str(program)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8")
    for name, text in json.loads(printed.stdout).items():
        yield from whole_text(text, f"stdlib:module/{name}")
