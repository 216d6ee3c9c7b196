"""Loss curves of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..figures import figure
from .metrics import read_metrics


def draw_losses(
    runs: list[Path], out: Path, levels: dict[str, float] | None = None
) -> dict[str, dict[str, Any]]:
    """Draw the training and validation loss of runs over tokens to a PNG; return what was drawn.

    `levels` are losses to compare with, drawn as lines across.

    Raises:
        FileNotFoundError: a run has no metrics.
    """
    curves = {str(run): _curves(run) for run in runs}
    with figure(out, figsize=(8, 5)) as axes:
        names = _short(runs)
        for number, (run, name) in enumerate(zip(runs, names)):
            curve, colour = curves[str(run)], f"C{number % 10}"
            axes.plot(*curve["training"], color=colour, linewidth=1.2, label=name)
            if curve["validation"][0]:
                label = "validation" if number == len(runs) - 1 else None
                axes.plot(*curve["validation"], "o--", color=colour, markersize=4, label=label)
        for name, level in (levels or {}).items():
            axes.axhline(level, color="black", linewidth=1, linestyle=":", label=name)
        axes.set(xlabel="training tokens", ylabel="loss, nats per token", title="Loss")
        axes.grid(alpha=0.3)
        axes.legend()
    return curves


def _curves(run: Path) -> dict[str, Any]:
    """(tokens, loss) of training and of validation."""
    records = read_metrics(run)
    training = [(r["tokens"], r["loss"]) for r in records if r.get("loss") is not None]
    if not training:
        raise ValueError(f"{run} has no losses yet")
    per_step = training[-1][0] / [r["step"] for r in records if "loss" in r][-1]
    validation = [
        (r["step"] * per_step, r["validation_loss"]) for r in records if "validation_loss" in r
    ]
    return {
        "training": tuple(zip(*training)),
        "validation": tuple(zip(*validation)) if validation else ((), ()),
    }


def _short(runs: list[Path]) -> list[str]:
    """The folders' names; with their parents where names repeat."""
    names = [run.name for run in runs]
    return [str(r) if names.count(n) > 1 else n for r, n in zip(runs, names)]
