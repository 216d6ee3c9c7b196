"""`trellis eval inspect`: arrays, a summary, a table and a picture of one text."""

from __future__ import annotations

import hashlib
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from ..files import write_whole
from .inspection import check_place, inspect, trellis_layers
from .inspection_picture import draw
from .memory_measures import half_life
from .output import print_table, progress
from .ppl import encode
from .record import Records
from .replay import PASSES, Arrays
from .subject import Subject
from .texts import hash_of


def run(
    subject: Subject,
    text: str,
    out: Path,
    *,
    tokens: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    probes: int = 64,
    rank_every: int = 1,
) -> tuple[dict[str, Any], Path, Path]:
    """Inspect the first `tokens` tokens of a text: the record, the arrays' file, the picture.

    Raises:
        ValueError: an empty text, no Trellis layer, no such layer or head.
    """
    check_place(subject, layer, head)
    if not text:
        raise ValueError("there is nothing to inspect: the text is empty")
    ids = encode(subject, text).ids[:tokens]
    setting = {
        "text_sha256": hash_of([text]),
        "tokens": len(ids),
        "layer": layer,
        "probes": probes,
        "rank_every": rank_every,
    }
    records = Records(out, "inspect")
    key = json.dumps([setting, subject.about["weights_sha256"]], sort_keys=True)
    stem = f"arrays-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    kept = records.folder / f"{stem}.npz"

    def measure() -> dict[str, Any]:
        with progress(f"reading, {subject.name}", len(ids) * len(trellis_layers(subject))) as moved:
            arrays = inspect(
                subject, ids, layer=layer, probes=probes, rank_every=rank_every, progress=moved
            )
        save(kept, arrays)
        return {"arrays": kept.name, "layers": summary(arrays)}

    record = records.measured(subject, setting, measure)
    if not kept.is_file():  # the record was there, its arrays were not
        measure()
    arrays = load(kept)
    _print(record, subject.name)
    place = "" if head is None else f"-head-{head}"
    picture = records.folder / f"{stem.replace('arrays', 'picture')}{place}.png"
    draw(picture, arrays, subject.name, layer=layer, head=head)
    print(f"arrays: {kept}\npicture: {picture}")
    return record, kept, picture


def save(path: Path, arrays: Arrays) -> None:
    """One .npz file, whole or not at all."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, buffer.getvalue())


def load(path: Path) -> Arrays:
    """What `save` wrote."""
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def summary(arrays: Arrays) -> list[dict[str, Any]]:
    """Means over heads and tokens, for every layer and memory."""
    return [
        {
            "layer": int(layer),
            "mode": str(arrays["mode"][n]),
            "replay_error": float(arrays["replay_error"][n]),
            **{memory: _summary(arrays, n, memory) for memory in PASSES},
        }
        for n, layer in enumerate(arrays["layers"])
    ]


def _summary(arrays: Arrays, n: int, memory: str) -> dict[str, Any]:
    def of(name: str) -> np.ndarray:
        return arrays[f"{memory}_{name}"][n]

    gates, power = of("forget_gate"), float(of("target_power").sum())
    return {
        "forget_gate": float(gates.mean()),
        # None: nothing is ever forgotten.
        "half_life": _finite(half_life(gates)),
        "half_life_of_slowest_head": _finite(max(half_life(one) for one in gates)),
        "step_size": float(of("step_size").mean()),
        "write_norm": float(of("write_norm").mean()),
        **{
            f"error_{when}": float(of(f"error_{when}").sum()) / power if power else None
            for when in ("before", "decayed", "after")
        },
        "memory_norm_at_end": float(of("memory_norm")[:, -1].mean()),
        "effective_rank_at_end": float(of("effective_rank")[:, -1].mean()),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _print(record: dict[str, Any], name: str) -> None:
    rows = []
    for layer in record["result"]["layers"]:
        for memory in PASSES:
            found = layer[memory]
            lives = (_life(found[key]) for key in ("half_life", "half_life_of_slowest_head"))
            errors = (_number(found[f"error_{when}"]) for when in ("before", "after"))
            rows.append([
                layer["layer"], memory, f"{found['forget_gate']:.3f}", *lives,
                f"{found['step_size']:.3f}", " \u2192 ".join(errors),
                f"{found['effective_rank_at_end']:.1f}",
            ])  # fmt: skip
    modes = ", ".join(dict.fromkeys(layer["mode"] for layer in record["result"]["layers"]))
    tokens = record["setting"]["tokens"]
    print_table(
        ["layer", "memory", "forget gate", "half-life, tokens", "of the slowest head",
         "step size", "error before \u2192 after", "effective rank at the end"],
        rows, f"{name} reading {tokens:,} tokens, mode: {modes}",
    )  # fmt: skip


def _life(tokens: float | None) -> str:
    return "\u221e" if tokens is None else f"{tokens:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
