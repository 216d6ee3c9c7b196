"""Prints, as JSON, what the interpreter's built-in modules say of themselves.

A program of its own, run by `stdlib.documentation` in a fresh interpreter: in a running one, other
packages may have replaced functions of these modules.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys


def describe(name: str) -> str:
    """The docstrings of a built-in module, which has no source to read them from."""
    module = importlib.import_module(name)
    parts = [f"{name}\n{'=' * len(name)}\n\n{inspect.getdoc(module) or ''}\n"]
    for key in sorted(vars(module)):
        value = vars(module)[key]
        if key.startswith("_") or not (inspect.isroutine(value) or inspect.isclass(value)):
            continue
        parts.append(_entry(f"{name}.{key}", value))
        if inspect.isclass(value) and getattr(value, "__module__", None) == name:
            # Inherited docstrings would be said again for every class.
            members = (m for m in sorted(vars(value)) if not m.startswith("__"))
            parts += [_entry(f"{name}.{key}.{m}", vars(value)[m]) for m in members]
    return "\n".join(part for part in parts if part)


def _entry(title: str, value: object) -> str:
    doc = getattr(value, "__doc__", None)
    if not isinstance(doc, str) or not doc.strip():
        return ""
    signature = getattr(value, "__text_signature__", None) or ""
    body = inspect.cleandoc(doc).replace("\n", "\n    ")
    return f"{title}{signature}\n    {body}\n"


if __name__ == "__main__":
    print(json.dumps({name: describe(name) for name in sorted(sys.builtin_module_names)}))
