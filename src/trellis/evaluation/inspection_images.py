"""What is left of each write: of what was written, and of what the memory knows by it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .inspection_axes import colours_for, mean_of, row_size, write_image
from .memory_measures import by_age, gained, half_life, retention
from .replay import RECALLS, Arrays

TITLES = ("the code of its key", "the code of its value", "its value, asked with its key")
#: Ages of a write in the last row, before and after it, at least.
AGES = 32
TIME = "time: the token just read"
AGE = "tokens since the write"


def draw_retentions(
    part: Any,
    arrays: Arrays,
    rows: list[list[tuple[str, Any]]],
    ages: int | None,
    inches: tuple[float, float],
    left_out: str,
) -> None:
    """Images of what the forget gates leave of every write."""
    said = [left_out] if left_out else []
    if len(rows) > 1:
        said.append("above the slowest head of a layer, below the fastest")
    which = f" ({'; '.join(said)})" if said else ""
    part.suptitle(f"How much the forget gates leave of each write to the keys{which}")
    axes = part.subplots(len(rows), len(rows[0]), squeeze=False, sharex=True, sharey=True)
    size = inches[0] / len(rows[0]) - 0.65, inches[1]
    for row, series in zip(axes, rows):
        for axis, (name, index) in zip(row, series):
            gates = arrays["keys_forget_gate"][index]
            left = mean_of(retention(gates, arrays["probes"]))
            image = write_image(axis, arrays, left, ages, size, cmap="viridis", vmin=0, vmax=1)
            lives = half_life(gates)
            life = "nothing is forgotten" if np.isinf(lives) else f"half-life {lives:.1f} tokens"
            axis.set_title(f"{name}: {life}", fontsize=10)
        row[0].set_ylabel("written token")
    part.supxlabel(_below(arrays, ages), fontsize=10)
    part.colorbar(image, ax=axes, label="left of the write", pad=0.01, aspect=40)


def draw_recalls(
    part: Any,
    arrays: Arrays,
    shown: tuple[int, int],
    ages: int | None,
    inches: tuple[float, float],
) -> None:
    """Images of what one head gained by each write, and what is left of it. shown: layer, head."""
    part.suptitle(f"How much better layer {shown[0]}, head {shown[1]} knows a token for its write")
    axes = part.subplots(1, len(RECALLS), sharey=True)
    size = inches[0] / len(RECALLS) - 1.3, inches[1]
    for axis, name, title in zip(axes, RECALLS, TITLES):
        gain = gained(knowledge(arrays, name, shown), arrays["probes"])
        there = np.abs(gain[np.isfinite(gain)])
        most = max(float(np.quantile(there, 0.9)), 1e-6) if there.size else 1.0
        image = write_image(axis, arrays, gain, ages, size, cmap="RdBu", vmin=-most, vmax=most)
        axis.set_title(title, fontsize=10)
        label = "cosine gained" if name == "recall_answer" else "error taken away"
        part.colorbar(image, ax=axis, label=label, pad=0.01)
    axes[0].set_ylabel("token asked for")
    grey = "the text has ended" if ages is not None else "not yet written"
    part.supxlabel(
        f"{_below(arrays, ages)}.  Shown is the change since just before the write, less "
        "the mean change in the same time of tokens that are still unwritten.\nBlue: better known "
        "for the write; white: as if it had never been written, so forgotten; red: worse.  Grey: "
        f"{grey}, or too few unwritten tokens left; also the first token.",
        fontsize=10,
    )


def _below(arrays: Arrays, ages: int | None) -> str:
    size = row_size(len(arrays["probes"]))
    rows = f" (a row: the mean of {size} tokens)" if size > 1 else ""
    return TIME if ages is None else AGE + rows


def knowledge(arrays: Arrays, name: str, shown: tuple[int, int]) -> np.ndarray:
    """A recall of a layer's head, [P, T], turned so that more is better."""
    place = arrays["recall_layers"].tolist().index(shown[0])
    recalled = arrays[name][place, shown[1]].astype(np.float64)
    return recalled if name == "recall_answer" else -recalled


def draw_ages(part: Any, arrays: Arrays, layer: int, heads: list[int], ages: int | None) -> None:
    """How well heads of the layer know a token before and after its write: means over tokens."""
    part.suptitle(
        f"How well heads of layer {layer} know a token, before and after its write (mean over "
        "tokens)"
    )
    axes = part.subplots(1, len(RECALLS))
    most = min(max(AGES, ages or 0), len(arrays["tokens"]) // 3)  # so that means are over many
    place = arrays["recall_layers"].tolist().index(layer)
    style = ".-" if most <= AGES else "-"
    for axis, name, title in zip(axes, RECALLS, TITLES):
        for one, colour in zip(heads, colours_for(len(heads), heads=True)):
            mean = by_age(arrays[name][place, one], arrays["probes"], most)
            axis.plot(np.arange(-most, most + 1), mean, style, color=colour, label=f"head {one}")
        axis.axvline(0, color="black", linewidth=0.8)
        axis.grid(alpha=0.3)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("tokens since it was written (0: just now)")
        axis.set_ylabel("cosine" if name == "recall_answer" else "error")
    handles, names = axes[0].get_legend_handles_labels()
    part.legend(
        handles, names, loc="outside right upper", frameon=False, ncols=-(-len(names) // 12)
    )
