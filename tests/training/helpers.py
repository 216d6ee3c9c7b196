"""Small runs for the training tests."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from trellis.data import prepare_corpus
from trellis.training.metrics import read_metrics
from trellis.training.recipe import from_dict

TEXT = Path(__file__).parent.parent / "assets" / "golden.txt"
TABLE = {
    "model": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
    "data": {"context": 32},
    "train": {"steps": 20, "rows": 4, "learning_rate": 5e-3, "warmup": 0.2},
    "log": {"every": 1, "validate_every": 10, "validation_tokens": 512},
    "checkpoint": {"every": 10},
}


def make_corpus(folder, documents=12, held_out=0.15, **options):
    """A byte corpus of the fixed text, cut into documents."""
    lines = TEXT.read_text().splitlines(keepends=True)
    size = len(lines) // documents + 1
    folder.mkdir(exist_ok=True)
    source = folder / "source.jsonl"
    parts = ["".join(lines[i : i + size]) for i in range(0, len(lines), size)]
    source.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    return prepare_corpus([source], folder / "corpus", validation=held_out, **options)


def table(corpus, **sections):
    """The recipe's table with some values changed: train={"steps": 5}."""
    changed = copy.deepcopy(TABLE)
    changed["data"]["path"] = str(corpus.path)
    for section, values in sections.items():
        changed.setdefault(section, {}).update(values)
    return changed


def recipe(corpus, **sections):
    return from_dict(table(corpus, **sections))


def comparable(run):
    """All metrics, timing aside."""
    records = read_metrics(run)
    for record in records:
        record.pop("timing", None)
    return records


def losses(run):
    return torch.tensor([r["loss"] for r in comparable(run) if "loss" in r], dtype=torch.float64)


def write_toml(path, table):
    """TOML of a table of sections; its values are written as JSON, which TOML reads as well."""
    lines = []
    for section, values in table.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def command(*arguments):
    return [sys.executable, "-m", "trellis.cli", *map(str, arguments)]


def environment(**more):
    """One thread: the same sums in every process, and no fight for cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "200", **more}


def run_command(*arguments, **options):
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, env=environment(), **options
    )
