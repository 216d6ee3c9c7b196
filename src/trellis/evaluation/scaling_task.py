"""`trellis eval scaling`: the table over runs, fits, and the figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..figures import figure
from ..files import write_whole
from .output import print_table, progress
from .ppl import encode, perplexity
from .record import Records, provenance
from .scaling import (
    PowerLaw,
    Training,
    check_tokenizers,
    check_validations,
    fit,
    read_training,
)
from .subject import Subject, load_subject
from .texts import documents, hash_of


def run(
    runs: Sequence[Path],
    out: Path,
    *,
    data: Sequence[str] = (),
    context: int | None = None,
    bits_per_byte: bool = False,
    document_bytes: int | None = None,
    limit: int | None = None,
    batch_tokens: int = 8192,
    device: str = "cpu",
) -> dict[str, Any]:
    """The runs' recorded validations, or with `data` their newest checkpoints measured on it.

    Returns what it writes to scaling.json: the records of the runs, and the fits.

    Raises:
        ValueError, FileNotFoundError: runs cannot be compared, or something is not there.
    """
    if bool(data) != (context is not None):
        raise ValueError("--data and --context go together: the text, and how much is read at once")
    trainings = [read_training(path) for path in runs]
    if data and not bits_per_byte:
        check_tokenizers(trainings)
    if not data:
        check_validations(trainings)
    texts = documents(data, limit=limit, document_bytes=document_bytes) if data else []
    records = Records(out, "scaling")
    found = []
    for training, name in zip(trainings, _labels(runs)):
        subject = load_subject(str(training.path), device)
        setting: dict[str, Any] = {
            "metrics_sha256": training.metrics_sha256,
            "validation": training.validation_text,
        }
        measure: Callable[[], dict[str, Any]] = partial(_recorded, training)
        if context is not None:
            setting |= {
                "data": list(data),
                "data_sha256": hash_of(texts),
                "documents": len(texts),
                "context": context,
            }
            measure = partial(_measured, training, subject, texts, context, batch_tokens)
        record = records.measured(subject, setting, measure)
        found.append({**record, "name": name})
    unit = "bits_per_byte" if bits_per_byte else "perplexity"
    fits = _fits(found, "bits_per_byte" if bits_per_byte else "loss")
    _print(found, fits, unit)
    _draw(found, records.folder / "scaling.png", unit)
    result = {
        "runs": found,
        "fits": {mixer: law._asdict() for mixer, law in fits.items()},
        "fitted": "bits per byte" if bits_per_byte else "loss, nats per token",
        "made_by": provenance(),
    }
    write_whole(records.folder / "scaling.json", (json.dumps(result, indent=1) + "\n").encode())
    return result


def _recorded(training: Training) -> dict[str, Any]:
    curve = training.curve()
    return {"mixer": training.mixer, "curve": curve, "final": curve[-1]}


def _measured(
    training: Training, subject: Subject, texts: list[str], context: int, batch_tokens: int
) -> dict[str, Any]:
    encoded = [encode(subject, text) for text in texts]
    total = sum(len(text.ids) - 1 for text in encoded)
    with progress(f"{subject.name}, {context}", total) as advance:
        found = perplexity(subject, encoded, context, batch_tokens=batch_tokens, progress=advance)
    final = training.point(training.step, found["loss"], found["bits_per_byte"])
    return {"mixer": training.mixer, "curve": [final], "final": final}


def _fits(found: list[dict[str, Any]], unit: str) -> dict[str, PowerLaw]:
    """Per mixer with enough runs."""
    laws = {}
    for mixer, records in _by_mixer(found).items():
        finals = [record["result"]["final"] for record in records]
        law = fit([f["flops"] for f in finals], [f[unit] for f in finals])
        if law is not None:
            laws[mixer] = law
    return laws


def _by_mixer(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Records of each mixer, in the order of their FLOPs."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in found:
        groups.setdefault(record["result"]["mixer"], []).append(record)
    return {
        mixer: sorted(records, key=lambda r: r["result"]["final"]["flops"])
        for mixer, records in groups.items()
    }


def _labels(runs: Sequence[Path]) -> list[str]:
    """The folders' names; whole paths where names repeat."""
    names = [path.resolve().name for path in runs]
    return [str(p) if names.count(n) > 1 else n for p, n in zip(runs, names)]


def _print(found: list[dict[str, Any]], fits: dict[str, PowerLaw], unit: str) -> None:
    rows = []
    for record in found:
        final = record["result"]["final"]
        rows.append(
            [
                record["name"],
                record["result"]["mixer"],
                f"{record['model']['parameters']:,}",
                f"{final['tokens']:,}",
                f"{final['flops']:.3e}",
                f"{final['perplexity']:.3f}",
                f"{final['bits_per_byte']:.3f}",
            ]
        )
    heads = ["run", "mixer", "parameters", "tokens", "FLOPs", "perplexity", "bits per byte"]
    print_table(heads, rows, "perplexity over training FLOPs")
    fitted = "bits per byte" if unit == "bits_per_byte" else "loss"
    for mixer, law in fits.items():
        print(f"{mixer}: {fitted} = {law.a:.4g} x FLOPs^{-law.b:.4f}")


def _draw(found: list[dict[str, Any]], path: Path, unit: str) -> None:
    """Runs as thin curves; a line through the final points of each mixer."""
    from matplotlib.ticker import LogFormatter

    with figure(path, figsize=(7, 4.5)) as axis:
        for number, (mixer, records) in enumerate(_by_mixer(found).items()):
            colour = f"C{number % 10}"
            for record in records:
                curve = record["result"]["curve"]
                x, y = [p["flops"] for p in curve], [p[unit] for p in curve]
                axis.plot(x, y, ".-", color=colour, alpha=0.35, linewidth=1, markersize=3)
            finals = [record["result"]["final"] for record in records]
            x, y = [p["flops"] for p in finals], [p[unit] for p in finals]
            axis.plot(x, y, "o-", color=colour, label=mixer)
        label = "bits per byte" if unit == "bits_per_byte" else "perplexity per token"
        axis.set(xscale="log", yscale="log", xlabel="training FLOPs", ylabel=label)
        axis.yaxis.set_major_formatter(LogFormatter())  # 20, not 2 x 10^1
        axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        axis.grid(alpha=0.3, which="both")
        axis.legend()
