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


def count_tokens(axis: Any) -> None:
    """Marks an axis from left to right with doubling counts of tokens: 512, 1k, 2k."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(
        lambda count, _: f"{count / 1024:g}k" if count >= 1024 else f"{count:g}"
    )
