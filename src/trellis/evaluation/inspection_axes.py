"""Pieces of a picture over the tokens of a text: axes, images, and curves of any length."""

from __future__ import annotations

from typing import Any

import numpy as np

from .memory_measures import over_age
from .replay import Arrays

#: More tokens than these have numbers instead of texts, and images over age instead of time.
TEXT_TOKENS = 80
#: Longer texts have curves of means over as many bins.
BINS = 250
#: Of an image over age, at most.
ROWS = 24
#: Inches that the text of a token needs beside the next.
LABEL = 0.078
#: Distinct to the colour-blind as well. Those of heads are others than those of layers.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8C510A",
)  # fmt: skip
HEAD_COLOURS = (
    "#332288", "#CC6677", "#999933", "#88CCEE", "#882255", "#117733", "#DDCC77", "#AA4499",
)  # fmt: skip


def write_image(
    axis: Any,
    arrays: Arrays,
    values: np.ndarray,
    ages: int | None,
    inches: tuple[float, float],
    **style: Any,
) -> Any:
    """values [P, T], written tokens down: to the right time, or with `ages` the age of the write.

    inches: width and height, about.
    """
    axis.set_facecolor("#dddddd")  # where there is nothing
    shown, places = values, arrays["probes"]
    if ages is not None:
        size = row_size(len(places))
        shown = over_age(values, places, ages)
        rows = [mean_of(shown[n : n + size]) for n in range(0, len(shown), size)]
        shown, places = np.stack(rows), places[::size]
    image = axis.imshow(shown, aspect="auto", interpolation="nearest", **style)
    if ages is None:
        token_axis(axis.xaxis, arrays, np.arange(len(arrays["tokens"])), inches[0])
    token_axis(axis.yaxis, arrays, places, inches[1])
    return image


def row_size(probes: int) -> int:
    """Written tokens whose mean is a row of an image over age: single ones would be noise."""
    return -(-probes // ROWS)


def token_axis(axis: Any, arrays: Arrays, places: np.ndarray, inches: float) -> None:
    """Texts of the tokens as ticks, as many as fit; numbers for long texts."""
    if len(arrays["tokens"]) > TEXT_TOKENS:
        if len(places) < len(arrays["tokens"]):
            ticks = spread(len(places), 9)
            axis.set_ticks(ticks, [str(places[n]) for n in ticks])
        return
    step = max(1, int(np.ceil(LABEL * len(places) / inches)))
    labels = [_label(arrays["tokens"][place]) for place in places[::step]]
    turned = {"rotation": 90} if axis.axis_name == "x" else {}
    axis.set_ticks(range(0, len(places), step), labels, fontsize=6, **turned)
    for tick in axis.get_ticklabels():
        tick.set_parse_math(False)


def _label(text: str) -> str:
    """White space that would not be seen, as signs; long tokens cut."""
    text = text.replace("\n", "\u21b5").replace("\t", "\u2192")
    text = text.strip(" ") or "\u2423" * len(text)
    return text if len(text) <= 13 else text[:12] + "\u2026"


def curve(axis: Any, values: np.ndarray, **style: Any) -> None:
    """Mean over heads; quantities not taken at every token are joined."""
    places, values = binned(values)
    mean = mean_of(values)
    there = ~np.isnan(mean)
    axis.plot(places[there], mean[there], **style)


def band(axis: Any, values: np.ndarray, colour: Any) -> None:
    """The range over heads."""
    places, values = binned(values)
    there = ~np.isnan(values).all(0)
    low, high = np.nanmin(values[:, there], 0), np.nanmax(values[:, there], 0)
    axis.fill_between(places[there], low, high, color=colour, alpha=0.12, linewidth=0)


def bin_size(tokens: int) -> int:
    """Tokens of a bin: 1 up to BINS tokens."""
    return -(-tokens // BINS)


def binned(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The middles of bins of tokens, and means over them: [heads, T] -> [heads, bins]."""
    tokens = values.shape[-1]
    size = bin_size(tokens)
    bins = -(-tokens // size)
    padded = np.full((values.shape[0], bins * size), np.nan)
    padded[:, :tokens] = values
    means = mean_of(padded.reshape(-1, bins, size).transpose(2, 0, 1))
    return np.arange(bins) * size + (size - 1) / 2, means


def mean_of(values: np.ndarray) -> np.ndarray:
    """Over the first dimension; NaN where all are."""
    count = (~np.isnan(values)).sum(0)
    return np.where(count > 0, np.nansum(values, 0) / np.maximum(count, 1), np.nan)


def colours_for(count: int, heads: bool) -> list[Any]:
    """As many colours, as distinct as can be, for heads or for layers."""
    few = HEAD_COLOURS if heads else COLOURS
    if count <= len(few):
        return list(few[:count])
    import matplotlib

    names = matplotlib.colormaps["plasma" if heads else "viridis"]
    return list(names(np.linspace(0, 0.9, count)))


def spread(count: int, most: int) -> list[int]:
    """At most so many of range(count), evenly."""
    return sorted({round(n) for n in np.linspace(0, count - 1, min(count, most))})
