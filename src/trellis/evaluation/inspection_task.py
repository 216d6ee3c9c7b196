"""`trellis eval inspect`: arrays, a summary, a table and a picture of one text."""

from __future__ import annotations

import hashlib
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from .. import figures
from ..files import write_whole
from .inspection import check_place, inspect, recalls_all, trellis_layers
from .inspection_picture import draw
from .memory_measures import half_life
from .output import print_table, progress
from .ppl import encode
from .record import Records
from .replay import PASSES, Arrays
from .subject import Subject

#: The replay must give the model's own outputs, up to rounding.
MOST_REPLAY_ERROR = 1e-3


def run(
    subject: Subject,
    text: str,
    out: Path,
    *,
    source: str = "the command line",
    tokens: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    probes: int = 64,
    rank_every: int = 1,
) -> tuple[dict[str, Any], Path, Path]:
    """Inspect the first `tokens` tokens of a text: the record, the arrays' file, the picture.

    All are named as the record is. source: where the text came from, for the record.

    Raises:
        ValueError: an empty text, no Trellis layer, no such layer or head; or the replay of the
            memory does not give the outputs of the model.
    """
    check_place(subject, layer, head)
    figures.check()
    if not text:
        raise ValueError("there is nothing to inspect: the text is empty")
    ids = encode(subject, text).ids[:tokens]
    setting = {
        "ids_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        "tokens": len(ids),
        "layer": None if recalls_all(subject, len(ids), probes) else layer,
        "probes": probes,
        "rank_every": rank_every,
    }
    records = Records(out, "inspect")
    measured: list[Arrays] = []

    def measure() -> dict[str, Any]:
        with progress(f"reading, {subject.name}", len(ids) * len(trellis_layers(subject))) as moved:
            arrays = inspect(
                subject, ids, layer=layer, probes=probes, rank_every=rank_every, progress=moved
            )
        check_replay(arrays)
        measured.append(arrays)
        return {"layers": summary(arrays)}

    record = records.measured(subject, setting, measure, {"source": source})
    written = records.file_of(subject, setting)
    if written is None:
        raise FileNotFoundError(f"the record is no longer in {records.folder}: it was deleted")
    kept = written.with_suffix(".npz")
    if not measured and not kept.is_file():  # the record was there, its arrays were not
        measure()
    if measured:
        save(kept, measured[0])
    arrays = load(kept)
    _print(record, subject.name)
    place = "" if layer is None else f"-layer-{layer}"
    place += "" if head is None else f"-head-{head}"
    picture = kept.with_name(f"{kept.stem}{place}.png")
    draw(picture, arrays, subject.name, layer=layer, head=head)
    print(f"arrays: {kept}\npicture: {picture}")
    return record, kept, picture


def check_replay(arrays: Arrays) -> None:
    """Raises ValueError if what was measured is not what the model computed."""
    for layer, error in zip(arrays["layers"], arrays["replay_error"]):
        if not error <= MOST_REPLAY_ERROR:  # NaN is wrong as well
            raise ValueError(
                f"the memory of layer {layer}, run again by its definition, does not give the "
                f"model's own outputs: they differ by {error:.1e} (relative RMS, at most "
                f"{MOST_REPLAY_ERROR:.0e} is rounding), so nothing was kept"
            )


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
        "half_life_of_fastest_head": _finite(min(half_life(one) for one in gates)),
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
            lives = (_life(found[f"half_life_of_{which}_head"]) for which in ("fastest", "slowest"))
            errors = (_number(found[f"error_{when}"]) for when in ("before", "after"))
            rows.append([
                layer["layer"], memory, f"{found['forget_gate']:.3f}", *lives,
                f"{found['step_size']:.3f}", " \u2192 ".join(errors),
                f"{found['effective_rank_at_end']:.1f}",
            ])  # fmt: skip
    modes = ", ".join(dict.fromkeys(layer["mode"] for layer in record["result"]["layers"]))
    tokens = record["setting"]["tokens"]
    print_table(
        ["layer", "memory", "forget gate", "half-life of the fastest head", "of the slowest",
         "step size", "error before \u2192 after", "effective rank at the end"],
        rows, f"{name} reading {tokens:,} tokens, mode: {modes}; half-lives in tokens",
    )  # fmt: skip
    most = max(layer["replay_error"] for layer in record["result"]["layers"])
    print(f"the memory run again gives the model's own outputs up to {most:.1e} (relative RMS)")


def _life(tokens: float | None) -> str:
    return "\u221e" if tokens is None else f"{tokens:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
