"""One picture of what a memory does while it reads.

Above, over the text: curves of every quantity, keys on the left and values on the right. Below,
in inspection_images.py: what is left of each write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..figures import figure
from .inspection import slowest
from .inspection_axes import (
    TEXT_TOKENS,
    band,
    bin_size,
    binned,
    colours_for,
    curve,
    mean_of,
    spread,
    token_axis,
)
from .inspection_images import draw_ages, draw_recalls, draw_retentions
from .memory_measures import half_life
from .replay import PASSES, Arrays

#: Inches: 1800 pixels.
WIDTH = 15.0
#: Of one image.
IMAGE = 2.1
#: More layers or heads than these have images of some only.
IMAGES = 4
#: With more curves, ranges would cover each other.
RANGES = 3
#: Longer texts have images over at least so many tokens of age, and over four half-lives.
AGES = 24
GATES = (("forget_gate", "forget gate: 1 keeps, 0 forgets"), ("step_size", "step size"))
ROWS = (
    ("write_norm", "norm of the write"),
    ("error", "error at the token, dotted before its write, solid after: 1 is no answer at all"),
    ("memory_norm", "norm of the memory"),
    ("effective_rank", "effective rank of the memory"),
)
EXPLAINED = (
    "A layer makes of every token a key, a value and a code, a few numbers that stand for it.\n"
    "A write is one step of learning: {pairs}.\n"
    "The step size says how far the step goes, the forget gate how much is kept of older writes."
)
PAIRS = {
    "encode": "one memory comes to answer the key with the code, the other the value with the code",
    "decode": "one memory comes to answer the key with the code, the other the code with the value",
}

#: A name, and an index into [layers, heads] that leaves heads as a dimension.
Series = list[tuple[str, Any]]


def draw(
    path: Path, arrays: Arrays, name: str, *, layer: int | None = None, head: int | None = None
) -> None:
    """Write the PNG. All layers, or the heads of one layer, or one head of it."""
    series = _series(arrays, layer, head)
    kept, left_out = _retained(arrays, series, layer)
    rows = _rows(arrays)
    heights = [0.7, 1.45 * len(rows) + 0.9, len(kept) * (IMAGE + 0.3) + 0.9, IMAGE + 1.5, 2.4]
    with figure(path, figsize=(WIDTH, sum(heights) + 0.4)) as blank:
        whole = blank.figure
        blank.remove()
        modes = ", ".join(dict.fromkeys(arrays["mode"].tolist()))
        whole.suptitle(
            f"What the memory of {name} does while reading (gradient: {modes})", fontsize=15
        )
        parts = whole.subfigures(len(heights), 1, height_ratios=heights)
        said = EXPLAINED.format(pairs=PAIRS[str(arrays["value_pass"][0])])
        parts[0].text(0.5, 0.5, said, ha="center", va="center", fontsize=10)
        _curves(parts[1], arrays, series, rows, heads=layer is not None)
        place = slowest(arrays, layer)
        shown = place if head is None else (place[0], head)
        ages = _ages(arrays, kept, shown)
        draw_retentions(parts[2], arrays, kept, ages, (WIDTH, IMAGE), left_out)
        draw_recalls(parts[3], arrays, shown, ages, (WIDTH, IMAGE))
        heads = range(arrays["keys_forget_gate"].shape[1]) if head is None else [head]
        draw_ages(parts[4], arrays, shown[0], list(heads), ages)


def _series(arrays: Arrays, layer: int | None, head: int | None) -> Series:
    """The curves: of every layer, or of heads of one layer."""
    layers = arrays["layers"].tolist()
    if layer is None:
        return [(f"layer {one}", (n, slice(None))) for n, one in enumerate(layers)]
    place = layers.index(layer)
    chosen = range(arrays["keys_forget_gate"].shape[1]) if head is None else [head]
    return [(f"layer {layer}, head {one}", (place, slice(one, one + 1))) for one in chosen]


def _retained(arrays: Arrays, series: Series, layer: int | None) -> tuple[list[Series], str]:
    """Rows of images of retention: the slowest and the fastest heads of layers, or the heads.

    And what is to be said if they are not all.
    """
    chosen = [series[n] for n in spread(len(series), IMAGES)]
    what = "layers" if layer is None else "heads"
    said = f"{len(chosen)} of {len(series)} {what}" if len(chosen) < len(series) else ""
    if layer is not None:
        return [chosen], said
    slow: Series = []
    fast: Series = []
    for name, (place, _) in chosen:
        order = np.argsort([half_life(one) for one in arrays["keys_forget_gate"][place]])
        for row, one in ((slow, int(order[-1])), (fast, int(order[0]))):
            row.append((f"{name}, head {one}", (place, slice(one, one + 1))))
    return ([slow, fast] if slow != fast else [slow]), said


def _ages(arrays: Arrays, kept: list[Series], shown: tuple[int, int]) -> int | None:
    """Ages that images show of a long text; None: they show time."""
    tokens = len(arrays["tokens"])
    if tokens <= TEXT_TOKENS:
        return None
    gates = arrays["keys_forget_gate"]
    recalled = gates[arrays["layers"].tolist().index(shown[0]), shown[1]]
    images = [gates[index] for row in kept for _, index in row]
    life = max(half_life(one) for one in (recalled, *images))
    return int(np.clip(4 * min(life, tokens), AGES, tokens // 3))


def _rows(arrays: Arrays) -> list[tuple[str, str]]:
    """Names of the axes, left and right. A gate that both memories share is drawn once."""
    shared = [
        name
        for name, _ in GATES
        if np.array_equal(arrays[f"keys_{name}"], arrays[f"values_{name}"], equal_nan=True)
    ]
    rows = [("forget_gate", "step_size")] if len(shared) == len(GATES) else []
    if not rows:
        rows = [_both(name) if name not in shared else (name, name) for name, _ in GATES]
    return rows + [_both(name) for name, _ in ROWS]


def _both(quantity: str) -> tuple[str, str]:
    return f"{PASSES[0]}_{quantity}", f"{PASSES[1]}_{quantity}"


def _curves(
    part: Any, arrays: Arrays, series: Series, rows: list[tuple[str, str]], heads: bool
) -> None:
    """A row for every quantity, a column for either memory: means over heads, and their range."""
    ratios = [1.5 if "error" in row[0] else 1.0 for row in rows]
    axes = part.subplot_mosaic([list(row) for row in rows], sharex=True, height_ratios=ratios)
    colours = colours_for(len(series), heads)
    ranges = len(series) <= RANGES
    titles = dict(GATES + ROWS)
    for row in rows:
        for name in dict.fromkeys(row):
            axis = axes[name]
            memory, _, quantity = name.partition("_")
            if memory not in PASSES:  # a shared gate
                quantity, memory = name, "keys and values"
            axis.set_title(f"{memory}: {titles[quantity]}", loc="left", fontsize=10)
            for colour, (label, index) in zip(colours, series):
                if quantity == "error":
                    _errors(axis, arrays, memory, index, colour, label, ranges)
                else:
                    source = name if memory in PASSES else f"keys_{name}"
                    _quantity(axis, arrays[source][index], colour, label, ranges)
            axis.grid(alpha=0.3)
            axis.margins(x=0.01)
            axis.tick_params(labelbottom=row is rows[-1])
        if row[0].startswith(PASSES[0]):
            axes[row[1]].sharey(axes[row[0]])
            axes[row[0]].autoscale_view()
    for name in rows[-1]:
        token_axis(axes[name].xaxis, arrays, np.arange(len(arrays["tokens"])), WIDTH / 2 - 0.6)
    handles, names = axes[rows[0][0]].get_legend_handles_labels()
    part.legend(
        handles, names, loc="outside upper center", ncols=min(len(names), 8),
        title=_legend_title(arrays, series, ranges), frameon=False,
    )  # fmt: skip


def _quantity(axis: Any, values: np.ndarray, colour: Any, label: str, ranges: bool) -> None:
    curve(axis, values, color=colour, label=label)
    if ranges and values.shape[0] > 1:
        band(axis, values, colour)


def _legend_title(arrays: Arrays, series: Series, ranges: bool) -> str:
    said = []
    if arrays["keys_forget_gate"][series[0][1]].shape[0] > 1:
        said = ["mean over heads", *(["band: their range"] if ranges else [])]
    size = bin_size(len(arrays["tokens"]))
    if size > 1:
        said.append(f"means of {size} tokens")
    return ", ".join(said)


def _errors(
    axis: Any, arrays: Arrays, memory: str, index: Any, colour: Any, label: str, fill: bool
) -> None:
    """Before and after the write, and what it gained between them."""
    power = np.maximum(arrays[f"{memory}_target_power"][index], 1e-30)
    before = arrays[f"{memory}_error_before"][index] / power
    after = arrays[f"{memory}_error_after"][index] / power
    curve(axis, before, color=colour, linestyle=":", linewidth=1.4, label=f"{label}, before")
    curve(axis, after, color=colour, label=label)
    axis.axhline(1, color="grey", linewidth=0.8)
    if fill:
        (places, high), (_, low) = binned(before), binned(after)
        axis.fill_between(
            places, mean_of(high), mean_of(low), color=colour, alpha=0.15, linewidth=0
        )
