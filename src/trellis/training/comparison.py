"""One recipe, several mixers: models of equal size on the same tokens, side by side."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..data import prepare_corpus
from ..data.shards import Corpus, open_corpus
from ..files import write_whole
from ..models.presets import count_parameters
from . import checkpoint as checkpoints
from .bigram import LARGEST_VOCABULARY, bigram_loss
from .loop import TrainingStopped
from .metrics import read_metrics
from .plot import draw_losses
from .recipe import Recipe
from .run import RECIPE, recipe_of, train, validation_part

#: Of the documents that are held out, where the comparison prepares the text itself.
VALIDATION = 0.03


@dataclasses.dataclass
class Row:
    mixer: str
    parameters: int
    first_loss: float | None  # None: it was not finite
    last_loss: float | None
    validation_loss: float
    skipped_steps: int
    tokens_per_second: float


def compare(
    recipe: Recipe, mixers: Sequence[str], out: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Train every mixer by the recipe into OUT/MIXER and write OUT/comparison.{md,json,png}.

    A finished run is taken as it is, one that was interrupted goes on. Where the recipe's text is
    not there yet, it is made from the recipe's sources.

    Raises:
        ValueError, FileNotFoundError: what is asked for does not fit together, or is not there.
        TrainingStopped: a run cannot go on, or a signal asked to stop.
    """
    if recipe.model.mixer_config:
        raise ValueError(
            "a comparison takes each mixer as it is by default, so the recipe's model.mixer_config "
            f"must be empty; got {recipe.model.mixer_config}"
        )
    if not mixers:
        raise ValueError("mixers must name at least one")
    chosen = {mixer: _with_mixer(recipe, mixer) for mixer in mixers}
    for mixer, one in chosen.items():
        one.check()
        _check_same(out / mixer, one)
    corpus = _prepared(recipe, say)
    held_out = validation_part(recipe, corpus)
    if held_out is None or held_out.tokens < 2:
        raise ValueError(
            f"data.path {recipe.data.path} holds nothing out to compare on: prepare it with "
            "--validation, or set data.validation_path"
        )
    for mixer, one in chosen.items():
        run = out / mixer
        if not _finished(run, one):
            say(f"\n{mixer}: {run}")
            train(one, run, resume=(run / RECIPE).exists())
        if not _finished(run, one):  # a signal asked to stop
            raise TrainingStopped(f"stopped in {run}; the same command goes on")
    vocabulary = corpus.tokenizer().vocab_size
    rows = [_row(mixer, one, out / mixer, vocabulary) for mixer, one in chosen.items()]
    counted = None
    if vocabulary <= LARGEST_VOCABULARY:
        counted = bigram_loss(
            corpus.train, held_out, vocabulary, recipe.data.context, recipe.log.validation_tokens
        )
    lines = _table(rows, counted)
    result = {
        "recipe": recipe.as_dict(),
        "bigram_loss": counted,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    write_whole(out / "comparison.json", (json.dumps(result, indent=1) + "\n").encode())
    write_whole(out / "comparison.md", ("\n".join(lines) + "\n").encode())
    level = {} if counted is None else {"bigram counts": counted}
    draw_losses([out / mixer for mixer in mixers], out / "comparison.png", levels=level)
    for line in lines:
        say(line)
    say(f"\nwritten to {out}/comparison.md, .json and .png")
    return result


def _prepared(recipe: Recipe, say: Callable[[str], None]) -> Corpus:
    """The recipe's text; made, where it is not there and the recipe says from what."""
    data = recipe.data
    if Path(data.path).exists():
        return open_corpus(data.path)
    if not data.sources:
        raise FileNotFoundError(f"there is no prepared text at {data.path}, and no data.sources")
    name = data.tokenizer
    if name.endswith(".json") and not Path(name).exists():
        raise FileNotFoundError(
            f"there is no tokenizer at {name}; make it with: trellis data tokenizer "
            f"{' '.join(data.sources)} --out {name}"
        )
    say(f"preparing {' '.join(data.sources)}: {data.path}")
    return prepare_corpus(data.sources, Path(data.path), tokenizer=name, validation=VALIDATION)


def _with_mixer(recipe: Recipe, mixer: str) -> Recipe:
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, mixer=mixer))


def _check_same(run: Path, recipe: Recipe) -> None:
    if (run / RECIPE).exists() and recipe_of(run).as_dict() != recipe.as_dict():
        raise ValueError(f"{run} was trained by another recipe: give another --out")


def _finished(run: Path, recipe: Recipe) -> bool:
    steps = checkpoints.steps_in(run) if run.exists() else []
    return bool(steps) and max(steps) >= recipe.steps


def _row(mixer: str, recipe: Recipe, run: Path, vocabulary: int) -> Row:
    records = read_metrics(run)
    trained = [record for record in records if "loss" in record]
    last = [record for record in records if "validation_loss" in record][-1]
    speeds = sorted(record["timing"]["tokens_per_second"] for record in trained)
    return Row(
        mixer=mixer,
        parameters=count_parameters(recipe.model.config(vocabulary)),
        first_loss=trained[0]["loss"],
        last_loss=trained[-1]["loss"],
        validation_loss=last["validation_loss"],
        skipped_steps=trained[-1].get("bad_steps", 0),
        tokens_per_second=speeds[len(speeds) // 2],
    )


def _table(rows: list[Row], counted: float | None) -> list[str]:
    against = [] if counted is None else ["against bigram counts"]
    heads = ["mixer", "parameters", "first loss", "last loss", "validation", *against,
             "skipped steps", "tokens/s"]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in sorted(rows, key=lambda row: row.validation_loss):
        difference = [] if counted is None else [f"{row.validation_loss - counted:+.3f}"]
        cells = [row.mixer, f"{row.parameters:,}", _loss(row.first_loss), _loss(row.last_loss),
                 f"{row.validation_loss:.3f}", *difference, str(row.skipped_steps),
                 f"{row.tokens_per_second:,.0f}"]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    if counted is not None:
        lines.append(f"| bigram counts of the training text | | | | {counted:.3f} | | | |")
    return ["Loss in nats per token.", "", *lines]


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.3f}"
