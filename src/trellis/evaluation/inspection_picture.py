"""One picture of what a memory does while it reads.

Above, over the text: curves of every quantity, keys on the left and values on the right. Below,
as images of written token by time: what forgetting leaves of each write, and what the memory can
still give back. Bright is remembered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..figures import figure
from .memory_measures import retention
from .replay import PASSES, Arrays

#: More tokens than these have numbers instead of texts.
TEXT_TOKENS = 72
#: More layers or heads than these are drawn in part.
IMAGES = 4
#: Distinct to the colour-blind as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
ROWS = (
    ("forget_gate", "forget gate\n1 keeps, 0 forgets"),
    ("step_size", "step size"),
    ("write_norm", "size of\nthe write"),
    ("error", "error at the token\n1 = knows nothing"),
    ("memory_norm", "size of\nthe memory"),
    ("effective_rank", "effective rank\nof the memory"),
)


def draw(
    path: Path, arrays: Arrays, name: str, *, layer: int | None = None, head: int | None = None
) -> None:
    """Write the PNG. All layers, or the heads of one layer, or one head of it."""
    tokens = len(arrays["tokens"])
    width = float(np.clip(tokens * 0.34 + 4, 14, 26))
    with figure(path, figsize=(width, 8 + 0.95 * width * 0.62)) as blank:
        whole = blank.figure
        blank.remove()
        modes = ", ".join(dict.fromkeys(arrays["mode"].tolist()))
        whole.suptitle(f"What the memory of {name} does while reading ({modes})", fontsize=15)
        above, middle, below = whole.subfigures(3, 1, height_ratios=[9, 3.4, 4.2])
        _curves(above, arrays, _series(arrays, layer, head))
        _retentions(middle, arrays, _series(arrays, layer, head))
        _recalls(below, arrays, head)


def _series(arrays: Arrays, layer: int | None, head: int | None) -> list[tuple[str, Any]]:
    """What is drawn: names, and indices into [layers, heads] that leave heads as a dimension."""
    layers = arrays["layers"].tolist()
    if layer is None:
        return [(f"layer {one}", (n, slice(None))) for n, one in enumerate(layers)]
    place = layers.index(layer)
    heads = int((~np.isnan(arrays["keys_forget_gate"][place, :, 0])).sum())
    chosen = range(heads) if head is None else [head]
    return [(f"layer {layer}, head {one}", (place, slice(one, one + 1))) for one in chosen]


def _curves(part: Any, arrays: Arrays, series: list[tuple[str, Any]]) -> None:
    """A row for every quantity, a column for either memory: means over heads, and their range."""
    axes = part.subplots(len(ROWS), 2, sharex=True, sharey="row")
    colours = _colours(len(series))
    for column, memory in enumerate(PASSES):
        axes[0, column].set_title(f"the memory of {memory}", fontsize=13)
        for row, (quantity, label) in enumerate(ROWS):
            axis = axes[row, column]
            for colour, (name, index) in zip(colours, series):
                if quantity == "error":
                    power = arrays[f"{memory}_target_power"][index]
                    before = arrays[f"{memory}_error_before"][index] / power
                    after = arrays[f"{memory}_error_after"][index] / power
                    _curve(axis, before, color=colour, linestyle=":", linewidth=1.2)
                    _curve(axis, after, color=colour, label=name)
                    axis.fill_between(
                        np.arange(before.shape[-1]), _mean(before), _mean(after),
                        color=colour, alpha=0.15, linewidth=0,
                    )  # fmt: skip
                    continue
                values = arrays[f"{memory}_{quantity}"][index]
                _curve(axis, values, color=colour, label=name)
                if values.shape[0] > 1 and len(series) <= 3:
                    _band(axis, values, colour)
            axis.grid(alpha=0.3)
            axis.margins(x=0.01)
            if column == 0:
                axis.set_ylabel(label)
        axes[3, column].set_ylim(bottom=0)
        axes[3, column].text(
            0.995, 0.95, "dotted: before the write, solid: after it", ha="right", va="top",
            transform=axes[3, column].transAxes, fontsize=9, backgroundcolor="#ffffffaa",
        )  # fmt: skip
        _token_axis(axes[-1, column].xaxis, arrays, np.arange(len(arrays["tokens"])))
    several = any(arrays["keys_forget_gate"][index].shape[0] > 1 for _, index in series)
    title = "mean over heads, band: their range" if several and len(series) <= 3 else None
    if several and title is None:
        title = "mean over heads"
    axes[0, 0].legend(loc="lower left", fontsize=9, title=title, ncols=min(len(series), 6))


def _retentions(part: Any, arrays: Arrays, series: list[tuple[str, Any]]) -> None:
    """Images of what the forget gates leave of every write."""
    written = arrays["probes"]
    chosen = [series[n] for n in _spread(len(series), IMAGES)]
    axes = part.subplots(1, len(chosen), squeeze=False)[0]
    for axis, (name, index) in zip(axes, chosen):
        with np.errstate(invalid="ignore"):
            left = _mean(retention(arrays["keys_forget_gate"][index], written))
        image = _image(axis, arrays, left, "viridis", 0, 1, texts=len(chosen) <= 3)
        axis.set_title(f"{name}: how much of a write forgetting leaves", fontsize=11)
    axes[0].set_ylabel("written token")
    part.colorbar(image, ax=list(axes), label="product of forget gates", pad=0.01)


def _recalls(part: Any, arrays: Arrays, head: int | None) -> None:
    """Images of what one head can give back, before and after it is told."""
    if head is None:
        place = arrays["layers"].tolist().index(int(arrays["recall_layer"]))
        gates = arrays["keys_forget_gate"][place]
        head = int(np.nanargmax(np.log(np.maximum(gates, 1e-30)).mean(-1)))
    axes = part.subplots(1, 3)
    where = f"layer {int(arrays['recall_layer'])}, head {head}"
    shown = (
        ("recall_keys", f"{where}: error of the code of token's key", "viridis_r", 0, "error"),
        ("recall_values", "error of the code of token's value", "viridis_r", 0, "error"),
        ("recall_answer", "asked for the key: is the answer the value?", "viridis", -1, "cosine"),
    )
    for axis, (name, title, colours, least, label) in zip(axes, shown):
        image = _image(axis, arrays, arrays[name][head], colours, least, 1, texts=True)
        axis.plot(arrays["probes"], np.arange(len(arrays["probes"])), color="white", linewidth=3)
        axis.plot(arrays["probes"], np.arange(len(arrays["probes"])), color="black", linewidth=1)
        axis.set_title(title, fontsize=11)
        part.colorbar(image, ax=axis, label=label, pad=0.01)
    axes[0].set_ylabel("token asked for")
    part.supxlabel(
        "time: the token just read. Left of the line the token asked for is not yet written.",
        fontsize=11,
    )


def _image(
    axis: Any, arrays: Arrays, values: np.ndarray, colours: str, least: float, most: float,
    *, texts: bool,
) -> Any:  # fmt: skip
    axis.set_facecolor("#dddddd")
    image = axis.imshow(
        values, aspect="auto", cmap=colours, vmin=least, vmax=most, interpolation="nearest"
    )
    _token_axis(axis.xaxis, arrays, np.arange(len(arrays["tokens"])), texts=texts)
    _token_axis(axis.yaxis, arrays, arrays["probes"], texts=texts)
    return image


def _token_axis(axis: Any, arrays: Arrays, places: np.ndarray, *, texts: bool = True) -> None:
    """Texts of tokens as ticks if there are few, else their numbers."""
    if texts and len(places) <= TEXT_TOKENS:
        labels = [_label(arrays["tokens"][place]) for place in places]
        upright = axis.axis_name == "x"
        axis.set_ticks(range(len(places)), labels, rotation=90 if upright else 0, fontsize=7.5)
        for tick in axis.get_ticklabels():
            tick.set_parse_math(False)
        return
    ticks = _spread(len(places), 9)
    axis.set_ticks(ticks, [str(places[n]) for n in ticks], fontsize=8)


def _label(text: str) -> str:
    """White space that would not be seen, as signs; long tokens cut."""
    text = text.replace("\n", "\u21b5").replace("\t", "\u2192")
    bare = text.strip(" ")
    text = bare if bare else "\u2423" * len(text)
    return text if len(text) <= 12 else text[:11] + "\u2026"


def _curve(axis: Any, values: np.ndarray, **style: Any) -> None:
    """Mean over heads; quantities not taken at every token are joined."""
    mean = _mean(values)
    there = np.flatnonzero(~np.isnan(mean))
    axis.plot(there, mean[there], **style)


def _band(axis: Any, values: np.ndarray, colour: Any) -> None:
    there = np.flatnonzero(~np.isnan(values).all(0))
    low, high = np.nanmin(values[:, there], 0), np.nanmax(values[:, there], 0)
    axis.fill_between(there, low, high, color=colour, alpha=0.12, linewidth=0)


def _mean(values: np.ndarray) -> np.ndarray:
    """Over heads; NaN where all are."""
    count = (~np.isnan(values)).sum(0)
    return np.where(count > 0, np.nansum(values, 0) / np.maximum(count, 1), np.nan)


def _colours(count: int) -> list[Any]:
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    import matplotlib

    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.9, count)))


def _spread(count: int, most: int) -> list[int]:
    """At most so many of range(count), evenly."""
    return sorted({round(n) for n in np.linspace(0, count - 1, min(count, most))})
