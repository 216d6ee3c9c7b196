"""Perplexity, or bits per byte, over training FLOPs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..figures import figure

LABELS = {"perplexity": "perplexity per token", "bits_per_byte": "bits per byte"}


def draw(path: Path, groups: dict[str, list[dict[str, Any]]], unit: str) -> None:
    """Runs as thin curves; a line through the last points of each group."""
    with figure(path, figsize=(9, 4.5)) as axis:
        for number, (name, rows) in enumerate(groups.items()):
            colour = f"C{number % 10}"
            for row in rows:
                x, y = ([point[key] for point in row["curve"]] for key in ("flops", unit))
                axis.plot(x, y, ".-", color=colour, alpha=0.35, linewidth=1, markersize=3)
            x, y = ([row["final"][key] for row in rows] for key in ("flops", unit))
            axis.plot(x, y, "o-", color=colour, label=name)
        axis.set(xscale="log", yscale="log", xlabel="training FLOPs", ylabel=LABELS[unit])
        _plain_ticks(axis)
        axis.grid(alpha=0.3, which="both")
        axis.set_title(_title(groups), loc="left", fontsize=10)
        axis.figure.legend(loc="outside right upper", frameon=False)


def _title(groups: dict[str, list[dict[str, Any]]]) -> str:
    """What dots and lines are, as far as there are any."""
    said = ["large dots: a run's end"]
    if any(len(row["curve"]) > 1 for rows in groups.values() for row in rows):
        said.insert(0, "small dots on pale lines: validations of a run")
    if any(len(rows) > 1 for rows in groups.values()):
        said.append("strong lines: all runs of a mixer")
    return "; ".join(said)


def _plain_ticks(axis: Any) -> None:
    """Numbers such as 20 and 120 at enough places, also where all values are near each other."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_ylim()
    locator: Any = MaxNLocator(9)
    if high > 30 * low:
        locator = LogLocator(subs=(1, 2, 3, 5), numticks=30)
    elif high > 2 * low:
        locator = LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), numticks=30)
    axis.yaxis.set_major_locator(locator)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    axis.yaxis.set_minor_locator(NullLocator())
