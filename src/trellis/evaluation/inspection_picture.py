"""One picture of what a memory does while it reads.

Above, over the text: curves of every quantity, keys on the left and values on the right. Below,
as images of written token by time: what forgetting leaves of each write, and how much better than
just before its write the memory of one head knows a token. Last, how well it knows it, by age.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..figures import figure
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
    token_image,
)
from .memory_measures import by_age, half_life, retention, since_written
from .replay import PASSES, RECALLS, Arrays

#: More layers or heads than these have images of some only.
IMAGES = 4
#: Ages of a write in the last row, before and after it.
AGES = 32
ROWS = (
    ("forget_gate", "forget gate: 1 keeps, 0 forgets"),
    ("step_size", "step size"),
    ("write_norm", "norm of the write"),
    ("error", "error at the token, dotted before its write, solid after: 1 is no answer at all"),
    ("memory_norm", "norm of the memory"),
    ("effective_rank", "effective rank of the memory"),
)
RECALL_TITLES = ("the code of its key", "the code of its value", "its value, asked with its key")

#: A name, and an index into [layers, heads] that leaves heads as a dimension.
Series = list[tuple[str, Any]]


def draw(
    path: Path, arrays: Arrays, name: str, *, layer: int | None = None, head: int | None = None
) -> None:
    """Write the PNG. All layers, or the heads of one layer, or one head of it."""
    series = _series(arrays, layer, head)
    kept = _retained(arrays, series, layer)
    tokens = len(arrays["tokens"])
    width = float(np.clip(tokens * 0.32 + 4, 15, 26)) if tokens <= TEXT_TOKENS else 18.0
    image = float(np.clip(len(arrays["probes"]) * 0.115, 2.5, 6.5))  # height of one, in inches
    heights = [11.0, len(kept) * (image + 0.4) + 1, image + 1.8, 2.8]
    with figure(path, figsize=(width, sum(heights) + 0.4)) as blank:
        whole = blank.figure
        blank.remove()
        modes = ", ".join(dict.fromkeys(arrays["mode"].tolist()))
        whole.suptitle(
            f"What the memory of {name} does while reading (gradient: {modes})", fontsize=16
        )
        parts = whole.subfigures(4, 1, height_ratios=heights)
        _curves(parts[0], arrays, series, width / 2 - 0.5)
        _retentions(parts[1], arrays, kept, width, image)
        shown = _slowest_head(arrays) if head is None else head
        _recalls(parts[2], arrays, shown, width / 3 - 1.2, image)
        _ages(parts[3], arrays, head)


def _series(arrays: Arrays, layer: int | None, head: int | None) -> Series:
    """The curves: of every layer, or of heads of one layer."""
    layers = arrays["layers"].tolist()
    if layer is None:
        return [(f"layer {one}", (n, slice(None))) for n, one in enumerate(layers)]
    place = layers.index(layer)
    chosen = range(arrays["keys_forget_gate"].shape[1]) if head is None else [head]
    return [(f"layer {layer}, head {one}", (place, slice(one, one + 1))) for one in chosen]


def _retained(arrays: Arrays, series: Series, layer: int | None) -> list[Series]:
    """Rows of images of retention: the slowest and the fastest heads of layers, or the heads."""
    chosen = [series[n] for n in spread(len(series), IMAGES)]
    if layer is not None:
        return [chosen]
    slow: Series = []
    fast: Series = []
    for name, (place, _) in chosen:
        order = np.argsort([half_life(one) for one in arrays["keys_forget_gate"][place]])
        for row, one in ((slow, int(order[-1])), (fast, int(order[0]))):
            row.append((f"{name}, head {one}", (place, slice(one, one + 1))))
    return [slow, fast] if slow != fast else [slow]


def _curves(part: Any, arrays: Arrays, series: Series, inches: float) -> None:
    """A row for every quantity, a column for either memory: means over heads, and their range."""
    axes = part.subplots(
        len(ROWS), 2, sharex=True, sharey="row", height_ratios=[1, 1, 1, 1.6, 1, 1]
    )
    colours = colours_for(len(series))
    ranges = len(series) <= 3
    for column, memory in enumerate(PASSES):
        for row, (quantity, title) in enumerate(ROWS):
            axis = axes[row, column]
            axis.set_title(f"{memory}: {title}", loc="left", fontsize=10)
            for colour, (name, index) in zip(colours, series):
                if quantity == "error":
                    _errors(axis, arrays, memory, index, colour)
                    continue
                values = arrays[f"{memory}_{quantity}"][index]
                curve(axis, values, color=colour, label=name)
                if ranges and values.shape[0] > 1:
                    band(axis, values, colour)
            axis.grid(alpha=0.3)
            axis.margins(x=0.01)
        axes[3, column].axhline(1, color="grey", linewidth=0.8)
        token_axis(axes[-1, column].xaxis, arrays, np.arange(len(arrays["tokens"])), inches)
    handles, names = axes[0, 0].get_legend_handles_labels()
    said = []
    if arrays["keys_forget_gate"][series[0][1]].shape[0] > 1:
        said = ["mean over heads", *(["band: their range"] if ranges else [])]
    size = bin_size(len(arrays["tokens"]))
    if size > 1:
        said.append(f"means of {size} tokens")
    part.legend(
        handles, names, loc="outside upper center", ncols=min(len(names), 8),
        title=", ".join(said), frameon=False,
    )  # fmt: skip


def _errors(axis: Any, arrays: Arrays, memory: str, index: Any, colour: Any) -> None:
    """Before and after the write, and what it gained between them."""
    power = np.maximum(arrays[f"{memory}_target_power"][index], 1e-30)
    before = arrays[f"{memory}_error_before"][index] / power
    after = arrays[f"{memory}_error_after"][index] / power
    curve(axis, before, color=colour, linestyle=":", linewidth=1.4)
    curve(axis, after, color=colour)
    (places, high), (_, low) = binned(before), binned(after)
    axis.fill_between(places, mean_of(high), mean_of(low), color=colour, alpha=0.15, linewidth=0)


def _retentions(part: Any, arrays: Arrays, rows: list[Series], width: float, height: float) -> None:
    """Images of what the forget gates leave of every write."""
    which = ": above the slowest head of a layer, below the fastest" if len(rows) > 1 else ""
    part.suptitle(f"How much the forget gates leave of each write to the keys{which}")
    axes = part.subplots(len(rows), len(rows[0]), squeeze=False, sharex=True, sharey=True)
    inches = width / len(rows[0]) - 0.6
    for row, series in zip(axes, rows):
        for axis, (name, index) in zip(row, series):
            left = mean_of(retention(arrays["keys_forget_gate"][index], arrays["probes"]))
            image = token_image(
                axis, arrays, left, (inches, height), cmap="viridis", vmin=0, vmax=1
            )
            lives = half_life(arrays["keys_forget_gate"][index])
            life = "nothing is forgotten" if np.isinf(lives) else f"half-life {lives:.1f} tokens"
            axis.set_title(f"{name}: {life}", fontsize=10)
        row[0].set_ylabel("written token")
    part.supxlabel("time: the token just read", fontsize=10)
    part.colorbar(image, ax=axes, label="left of the write", pad=0.01, aspect=40)


def _recalls(part: Any, arrays: Arrays, head: int, width: float, height: float) -> None:
    """Images of how much better one head knows every token than just before it was told."""
    place = f"layer {int(arrays['recall_layer'])}, head {head}"
    part.suptitle(f"What {place} knows of each token, against just before it was written")
    axes = part.subplots(1, 3, sharey=True)
    probes = arrays["probes"]
    for axis, name, title in zip(axes, RECALLS, RECALL_TITLES):
        gain = since_written(arrays[name][head], probes)
        gain = gain if name == "recall_answer" else -gain
        most = max(float(np.nanquantile(np.abs(gain), 0.98)), 1e-6) if len(probes) > 1 else 1.0
        inches = (width, height)
        image = token_image(axis, arrays, gain, inches, cmap="RdBu", vmin=-most, vmax=most)
        axis.plot(probes, np.arange(len(probes)), color="black", linewidth=1)
        axis.set_title(title, fontsize=10)
        label = "cosine gained" if name == "recall_answer" else "error taken away"
        part.colorbar(image, ax=axis, label=label, pad=0.01)
    axes[0].set_ylabel("token asked for")
    part.supxlabel(
        "time: the token just read. Blue right of the line: remembered; it pales as it is "
        "forgotten. Left of the line the token is not yet written.",
        fontsize=10,
    )


def _ages(part: Any, arrays: Arrays, head: int | None) -> None:
    """Means of the images above by age of the write, for all heads of the layer."""
    layer = int(arrays["recall_layer"])
    part.suptitle("How well it knows a token, by age: mean over tokens")
    axes = part.subplots(1, 3)
    most = min(AGES, len(arrays["tokens"]) // 3)  # so that means are over many tokens
    heads = range(len(arrays[RECALLS[0]])) if head is None else [head]
    for axis, name, title in zip(axes, RECALLS, RECALL_TITLES):
        for one, colour in zip(heads, colours_for(len(heads))):
            mean = by_age(arrays[name][one], arrays["probes"], most)
            label = f"layer {layer}, head {one}"
            axis.plot(np.arange(-most, most + 1), mean, ".-", color=colour, label=label)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.grid(alpha=0.3)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("tokens since it was written (0: just now)")
        axis.set_ylabel("cosine" if name == "recall_answer" else "error")
    axes[0].legend(fontsize=8)


def _slowest_head(arrays: Arrays) -> int:
    place = arrays["layers"].tolist().index(int(arrays["recall_layer"]))
    return int(np.argmax([half_life(one) for one in arrays["keys_forget_gate"][place]]))
