"""One picture of what a memory does while it reads: how long it keeps each token, how much it
forgets and writes at each token, and how much better it knows a token after writing it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...figures import figure

Arrays = dict[str, np.ndarray]
#: The two memories; their names stand before those of the quantities: keys_forget_gate.
PASSES = ("keys", "values")
#: The width of the picture in inches, which makes 1800 pixels.
WIDTH = 15.0
#: Images in a row: one for each layer, or for each head of one layer.
COLUMNS = 3
#: A longer text has numbers on its axes instead of tokens, and images show the age of a write.
TEXT_TOKENS = 80
#: The images of such a text show at least this many tokens after a write.
AGES = 24
#: The curves of a text with more tokens than this are means over this many bins.
BINS = 250
#: The room that the label of a token needs, in inches.
LABEL = 0.09
#: Colours that the colour-blind can tell apart, too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
EXPLAINED = (
    "A layer writes every token into a memory of fixed size. The forget gate says how much of all "
    "older writes stays, the step size how far the memory moves towards the new token."
)

#: A head: its place among the layers of the arrays, and its number.
Head = tuple[int, int]


def draw(
    path: Path, arrays: Arrays, name: str, *, layer: int | None = None, head: int | None = None
) -> None:
    """Writes the PNG, of a few layers, of the heads of one layer, or of one head."""
    rows = _heads(arrays, layer, head)
    curves: dict[str, Any]
    heights = [0.75, 2.6 * len(rows) + 0.9, 2.7, 2.7]
    with figure(path, figsize=(WIDTH, sum(heights))) as blank:
        whole = blank.figure
        blank.remove()
        top, kept, gates, errors = whole.subfigures(4, 1, height_ratios=heights)
        title = f"The memory of {name} while it reads {len(arrays['tokens']):,} tokens"
        top.suptitle(title, fontsize=16)
        top.text(0.5, 0.12, EXPLAINED, ha="center", va="bottom", fontsize=10)
        if layer is None:
            curves = {f"layer {arrays['layers'][place]}": place for place, _ in rows[0]}
            _draw_kept(kept, arrays, rows, (" (slowest)", " (fastest)"))
            _draw_gates(gates, arrays, curves, ", mean of heads")
            _draw_errors(errors, arrays, slice(None), "mean of all layers")
        else:
            heads = list(itertools.chain(*rows))
            place = heads[0][0]
            curves = {f"head {one}": (place, slice(one, one + 1)) for _, one in heads}
            _draw_kept(kept, arrays, rows, [""] * len(rows))
            _draw_gates(gates, arrays, curves, f" of layer {layer}")
            of = "mean of heads" if head is None else f"head {head}"
            index = place if head is None else heads[0]
            _draw_errors(errors, arrays, index, f"layer {layer}, {of}")


def _heads(arrays: Arrays, layer: int | None, head: int | None) -> list[list[Head]]:
    """Rows of images: the slowest and the fastest head of a few layers; or the heads of one layer
    from the slowest to the fastest; or one head."""
    layers, gates = arrays["layers"].tolist(), arrays["keys_forget_gate"]
    slowest_first = [
        sorted(range(gates.shape[1]), key=lambda head: -half_life(of_layer[head]))
        for of_layer in gates
    ]
    if layer is None:
        few = spread(len(layers), COLUMNS)
        ends = (0, -1) if gates.shape[1] > 1 else (0,)
        return [[(place, slowest_first[place][end]) for place in few] for end in ends]
    place = layers.index(layer)
    order = slowest_first[place]
    chosen = [order[n] for n in spread(len(order), 2 * COLUMNS)] if head is None else [head]
    return [[(place, one) for one in chosen[n : n + COLUMNS]]
            for n in range(0, len(chosen), COLUMNS)]  # fmt: skip


def _draw_kept(part: Any, arrays: Arrays, rows: list[list[Head]], names: Sequence[str]) -> None:
    """Images of what the forget gates leave of every write. names: what each row shows."""
    tokens, probes, layers = len(arrays["tokens"]), arrays["probes"], arrays["layers"]
    ages = None
    if tokens > TEXT_TOKENS:
        # Images of a long text show about four half-lives after a write.
        life = max(half_life(arrays["keys_forget_gate"][one]) for row in rows for one in row)
        ages = int(np.clip(4 * min(life, tokens), AGES, tokens // 3))
    axes = part.subplots(len(rows), len(rows[0]), squeeze=False, sharex=True, sharey=True)
    for row, heads, which in zip(axes, rows, names):
        for axis in row[len(heads) :]:
            axis.remove()
        for axis, (place, head) in zip(row, heads):
            gates = arrays["keys_forget_gate"][place, head]
            left = 100 * retention(gates, probes)
            if ages is not None:
                left = over_age(left, probes, ages)
            axis.set_facecolor("#e4e4e4")
            image = axis.imshow(
                left, aspect="auto", interpolation="nearest", cmap="YlGnBu", vmin=0, vmax=100
            )
            life = half_life(gates)
            said = "forgets nothing" if math.isinf(life) else f"half-life {life:.1f} tokens"
            axis.set_title(f"layer {layers[place]}, head {head}{which}: {said}", fontsize=10)
            token_axis(axis.yaxis, arrays, probes, 2.3)
            if ages is None:
                token_axis(axis.xaxis, arrays, np.arange(tokens), WIDTH / len(rows[0]) - 1.2)
        row[0].set_ylabel("written token" if ages is None else "place of the written token")
    shown = len({place for place, _ in rows[0]})
    few = f"; {shown} of {len(layers)} layers" if len(names) > 1 and shown < len(layers) else ""
    part.suptitle(
        f"What is kept of each token (a row is a token, dark as long as it is kept{few})",
        fontsize=12,
    )
    below = ("token being read", "not written yet") if ages is None else (
        "tokens read since the write", "after the end of the text")  # fmt: skip
    part.supxlabel("{}  (grey: {})".format(*below), fontsize=10)
    part.colorbar(image, ax=axes, label="kept of the write, %", pad=0.01, aspect=30)


def _draw_gates(part: Any, arrays: Arrays, curves: dict[str, Any], whose: str) -> None:
    """The forget gate and the step size over the text. curves: indices [layers, heads] by name."""
    drawn = (
        ("forget_gate", "forget gate, %", f"Forget gate{whose}: kept of older writes", 100),
        ("step_size", "step size", f"Step size{whose}: strength of the write", 1),
    )
    for axis, (name, unit, title, scale) in zip(part.subplots(1, 2), drawn):
        keys, values = (scale * arrays[f"{memory}_{name}"] for memory in PASSES)
        styles = {"": (keys, "-")}
        if not np.array_equal(keys, values, equal_nan=True):
            styles = {", keys": (keys, "-"), ", values": (values, ":")}
        for colour, (label, index) in zip(itertools.cycle(COLOURS), curves.items()):
            for memory, (gate, style) in styles.items():
                _curve(axis, gate[index], color=colour, linestyle=style, label=label + memory)
        _finish(axis, arrays, title, unit)


def _draw_errors(part: Any, arrays: Arrays, index: Any, whose: str) -> None:
    """The error of a memory's answer for the token just read, before and after it is written."""
    for axis, memory in zip(part.subplots(1, 2, sharey=True), PASSES):
        power = np.maximum(arrays[f"{memory}_target_power"][index], 1e-30)
        before, after = (
            100 * (arrays[f"{memory}_error_{when}"][index] / power).reshape(-1, power.shape[-1])
            for when in ("before", "after")
        )
        style = {"color": COLOURS[1], "linestyle": "--"}
        places, high = _curve(axis, before, label="before its write", **style)
        _, low = _curve(axis, after, color=COLOURS[0], label="after its write")
        axis.fill_between(places, high, low, color=COLOURS[0], alpha=0.12)
        axis.axhline(100, color="grey", linewidth=0.8)
        title = f"Error for each token, {memory} ({whose})"
        _finish(axis, arrays, title, "error, % (100: no answer)")
        axis.set_ylim(bottom=0)


def _finish(axis: Any, arrays: Arrays, title: str, unit: str) -> None:
    """The title, unit, grid, legend and tokens of curves over the text."""
    tokens = len(arrays["tokens"])
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_ylabel(unit)
    axis.grid(alpha=0.3)
    axis.margins(x=0.01)
    if tokens > TEXT_TOKENS:
        size = bin_size(tokens)
        axis.set_xlabel("token" if size == 1 else f"token (means of {size})")
    token_axis(axis.xaxis, arrays, np.arange(tokens), WIDTH / 2 - 0.9)
    count = len(axis.get_legend_handles_labels()[0])
    axis.legend(
        loc="lower right", bbox_to_anchor=(1.01, 0.97), ncols=min(count, 6), fontsize=8,
        frameon=False, columnspacing=1.0, handlelength=1.5,
    )  # fmt: skip


def token_axis(axis: Any, arrays: Arrays, places: np.ndarray, inches: float) -> None:
    """Ticks with the texts of tokens, as many as fit into `inches`; numbers for a long text."""
    if len(arrays["tokens"]) > TEXT_TOKENS:
        if len(places) < len(arrays["tokens"]):
            ticks = spread(len(places), 7)
            axis.set_ticks(ticks, [str(places[n]) for n in ticks])
        return
    step = max(1, math.ceil(LABEL * len(places) / inches))
    labels = [_label(arrays["tokens"][place]) for place in places[::step]]
    turned = {"rotation": 90} if axis.axis_name == "x" else {}
    axis.set_ticks(range(0, len(places), step), labels, fontsize=7, **turned)
    for tick in axis.get_ticklabels():
        tick.set_parse_math(False)


def _label(text: str) -> str:
    """A token with signs for white space that would not be seen; long tokens are cut."""
    text = text.replace("\n", "\u21b5").replace("\t", "\u2192")
    text = text.strip(" ") or "\u2423" * len(text)
    return text if len(text) <= 9 else text[:8] + "\u2026"


def _curve(axis: Any, values: np.ndarray, **style: Any) -> tuple[np.ndarray, np.ndarray]:
    """Draws the mean over heads of values [heads, T] and returns what is drawn, x and y."""
    places, values = binned(values)
    axis.plot(places, mean_of(values), **style)
    return places, mean_of(values)


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
    """The mean over the first dimension without NaNs; NaN where there is nothing else."""
    count = (~np.isnan(values)).sum(0)
    return np.where(count > 0, np.nansum(values, 0) / np.maximum(count, 1), np.nan)


def spread(count: int, most: int) -> list[int]:
    """At most `most` numbers of range(count), evenly spread."""
    return sorted({round(n) for n in np.linspace(0, count - 1, min(count, most))})


def retention(forget_gate: np.ndarray, written: np.ndarray) -> np.ndarray:
    """How much is left at token t of what token i wrote: the product of the gates after i up to t.

    forget_gate [..., T], written [P] -> [..., P, T], NaN before the write. This is exact: the
    memory is the sum of all writes, each times this factor. Later writes may cancel it further,
    which the arrays of recall show.
    """
    tokens = forget_gate.shape[-1]
    found = np.full((*forget_gate.shape[:-1], len(written), tokens), np.nan, forget_gate.dtype)
    left = found[..., 0].copy()
    for t in range(tokens):
        left = left * forget_gate[..., None, t]
        left[..., written == t] = 1.0
        found[..., t] = left
    return found


def over_age(values: np.ndarray, written: np.ndarray, most: int) -> np.ndarray:
    """values [P, T] by time -> [P, most + 1] by age, the tokens since `written` [P]; NaN beyond
    the text."""
    place = written[:, None] + np.arange(most + 1)
    inside = place < values.shape[1]
    rows = np.arange(len(written))[:, None]
    return np.where(inside, values[rows, np.minimum(place, values.shape[1] - 1)], np.nan)


def half_life(forget_gate: np.ndarray) -> float:
    """Tokens after which the mean gate (its geometric mean) has halved a write; may be inf."""
    with np.errstate(divide="ignore"):
        mean = float(np.mean(np.log(forget_gate.astype(np.float64))))
    return math.inf if mean == 0 else math.log(0.5) / mean
