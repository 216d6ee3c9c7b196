"""Figures as PNG files, without a screen."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def check() -> None:
    """Raises ModuleNotFoundError if matplotlib is missing; call it before a long measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "figures need matplotlib: pip install 'trellis-memory[plots]'", name="matplotlib"
        )


@contextmanager
def figure(path: Path, columns: int = 1, **options: Any) -> Iterator[Any]:
    """A context that yields matplotlib axes to draw on (a list if columns > 1), then writes a PNG.

    options: passed to matplotlib's subplots, such as figsize=(8, 5).
    """
    check()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(1, columns, layout="constrained", **options)
    try:
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, dpi=120)
    finally:
        plt.close(drawn)
