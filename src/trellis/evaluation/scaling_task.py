"""`trellis eval scaling`: the table over runs, fits, and the figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .. import figures
from ..files import write_whole
from ..training.run import load_run
from .output import print_table, progress
from .ppl import encode, perplexity
from .record import Records, check_writable, digest, provenance
from .scaling import (
    PowerLaw,
    Training,
    check_tokenizers,
    check_validations,
    fit,
    read_training,
    variants,
)
from .scaling_picture import draw
from .scoring import BATCH_TOKENS
from .subject import Subject
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
    batch_tokens: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """The runs' recorded validations, or with `data` their newest checkpoints measured on it.

    Only perplexities on `data` are kept as records; FLOPs and curves are read and counted anew.
    Returns what it writes to scaling-HASH.json: the runs and the fits.

    Raises:
        ValueError, FileNotFoundError: runs cannot be compared, or something is not there.
    """
    _check_options(data, context, document_bytes, limit, batch_tokens)
    figures.check()
    paths = list({path.resolve(): path for path in runs}.values())
    trainings = [read_training(path) for path in paths]
    same_tokens = len({training.tokenizer_sha256 for training in trainings}) == 1
    if data and not bits_per_byte:
        check_tokenizers(trainings)
    if not data:
        check_validations(trainings)
    texts = documents(data, limit=limit, document_bytes=document_bytes) if data else []
    setting: dict[str, Any] = {}
    if data:
        setting = {
            "data_sha256": hash_of(texts),
            "documents": len(texts),
            "context": context,
            "windows": "disjoint",
        }
    check_writable(out, out)
    records = Records(out, "scaling")
    found = []
    for training, variant, name in zip(trainings, variants(trainings), _labels(paths)):
        row = _row(training, variant, name)
        if context is None:
            row |= {"validation": training.validation_text, "curve": training.curve()}
        else:
            subject = _subject(training, name, device)
            measure = partial(_measure, subject, texts, context, batch_tokens or BATCH_TOKENS)
            record = records.measured(subject, setting, measure, {"data": list(data)})
            result = record["result"]
            row |= {
                "setting": setting,
                "weights_sha256": record["model"]["weights_sha256"],
                "curve": [training.point(training.step, result["loss"], result["bits_per_byte"])],
            }
        found.append({**row, "final": row["curve"][-1]})
    unit = "bits_per_byte" if bits_per_byte else "perplexity"
    fits = _fits(found, "bits_per_byte" if bits_per_byte else "loss")
    _print(found, fits, unit, same_tokens)
    result = {
        "runs": found,
        "fits": {variant: law._asdict() for variant, law in fits.items()},
        "fitted": "bits per byte" if bits_per_byte else "loss, nats per token",
        "made_by": provenance(),
    }
    stem = f"scaling-{digest([sorted(str(path.resolve()) for path in paths), unit, setting])}"
    written, picture = out / f"{stem}.json", out / f"{stem}.png"
    draw(picture, by_variant(found), unit)
    write_whole(written, (json.dumps(result, indent=1) + "\n").encode())
    print(f"numbers: {written}\nfigure: {picture}")
    return result


def _check_options(
    data: Sequence[str],
    context: int | None,
    document_bytes: int | None,
    limit: int | None,
    batch_tokens: int | None,
) -> None:
    """Raises ValueError at options that would do nothing."""
    if bool(data) != (context is not None):
        raise ValueError("--data and --context go together: the text, and how much is read at once")
    options = {"document-bytes": document_bytes, "limit": limit, "batch-tokens": batch_tokens}
    for name, value in options.items():
        if value is not None and not data:
            raise ValueError(
                f"--{name} {value} needs --data: recorded validations are taken as they are"
            )


def _subject(training: Training, name: str, device: str) -> Subject:
    """The weights of the step that FLOPs are counted up to: a run may go on meanwhile."""
    model, tokenizer = load_run(training.path, training.step, device)
    about = {
        "path": str(training.path),
        "recipe": training.recipe.as_dict(),
        "step": training.step,
    }
    return Subject(name, model, tokenizer, about)


def _row(training: Training, variant: str, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "path": str(training.path),
        "mixer": training.mixer,
        "variant": variant,
        "parameters": training.parameters,
        "step": training.step,
        "recipe": training.recipe.as_dict(),
    }


def _measure(subject: Subject, texts: list[str], context: int, batch_tokens: int) -> dict[str, Any]:
    encoded = [encode(subject, text) for text in texts]
    total = sum(len(text.ids) - 1 for text in encoded)
    with progress(f"{subject.name}, {context}", total) as advance:
        return perplexity(subject, encoded, context, batch_tokens=batch_tokens, progress=advance)


def _fits(found: list[dict[str, Any]], unit: str) -> dict[str, PowerLaw]:
    """Per variant with enough runs."""
    laws = {}
    for variant, rows in by_variant(found).items():
        law = fit([r["final"]["flops"] for r in rows], [r["final"][unit] for r in rows])
        if law is not None:
            laws[variant] = law
    return laws


def by_variant(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs of each mixer and its variant, in the order of their FLOPs."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        groups.setdefault(row["variant"], []).append(row)
    return {
        variant: sorted(rows, key=lambda row: row["final"]["flops"])
        for variant, rows in groups.items()
    }


def _labels(runs: Sequence[Path]) -> list[str]:
    """The folders' names; whole paths where names repeat."""
    names = [path.resolve().name for path in runs]
    return [str(p) if names.count(n) > 1 else n for p, n in zip(runs, names)]


def _print(
    found: list[dict[str, Any]], fits: dict[str, PowerLaw], unit: str, same_tokens: bool
) -> None:
    """Perplexities per token are left out where tokens are not the same."""
    units = {"perplexity": "perplexity per token", "bits_per_byte": "bits per byte"}
    shown = [one for one in units if one != "perplexity" or same_tokens]
    shown.sort(key=lambda one: one != unit)
    rows = []
    for row in found:
        final = row["final"]
        rows.append([
            row["name"], row["variant"], f"{row['parameters']:,}", f"{final['tokens']:,}",
            f"{final['flops']:.3e}", *(f"{final[one]:.3f}" for one in shown),
        ])  # fmt: skip
    heads = ["run", "mixer", "parameters", "tokens", "FLOPs", *(units[one] for one in shown)]
    print_table(heads, rows, f"{units[unit]} over training FLOPs")
    fitted = "bits per byte" if unit == "bits_per_byte" else "loss"
    for variant, law in fits.items():
        print(f"{variant}: {fitted} = {law.a:.4g} x FLOPs^{-law.b:.4f}")
