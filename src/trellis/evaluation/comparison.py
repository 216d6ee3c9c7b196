"""Runs side by side: several mixers trained by one recipe, and the loss curves of any runs.

A comparison also has the loss of a count model of token pairs, which a model that learns must beat:

    p(b | a) = (count(a b) + strength p(b)) / (count(a) + strength)

p(b) is the share of b among the tokens that another token follows. The strength is the one that
does best on the held-out text itself, so that the count model is at its best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np

from ..data import prepare_corpus
from ..data.batches import assemble, validation_windows
from ..data.shards import Corpus, open_corpus
from ..figures import figure
from ..files import write_json, write_whole
from ..models.loss import IGNORED
from ..models.presets import count_parameters
from ..training import checkpoint as checkpoints
from ..training.loop import Diverged, Interrupted
from ..training.metrics import read_metrics
from ..training.recipe import Recipe
from ..training.run import RECIPE, recipe_of, train, validation_part

#: The share of documents that is held out, if the comparison prepares the text itself.
VALIDATION = 0.03
STRENGTHS = (0.3, 1, 3, 10, 30, 100, 300, 1000)
#: Pairs are counted in a table of vocabulary x vocabulary entries.
LARGEST_VOCABULARY = 8192
_READ = 1 << 22  # tokens that are counted at a time


#: One mixer's line in the table; a loss of training is None if it was not finite.
Row = dict[str, Any]


def compare(
    recipe: Recipe, mixers: Sequence[str], out: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Train every mixer by the recipe into OUT/MIXER and write OUT/comparison.{md,json,png}.

    A finished run is not trained again, and an interrupted one is resumed. If the recipe's text is
    missing, it is prepared from the recipe's sources.

    Raises:
        ValueError, FileNotFoundError: the recipe and what is there do not fit together, or
            something is missing.
        TrainingStopped: a run cannot go on, or a signal asked to stop.
    """
    if recipe.model.mixer_config:
        raise ValueError(
            "a comparison takes each mixer as it is by default, so the recipe's model.mixer_config "
            f"must be empty; got {recipe.model.mixer_config}"
        )
    if not mixers:
        raise ValueError("mixers must name at least one")
    chosen = {mixer: replace(recipe, model=replace(recipe.model, mixer=mixer)) for mixer in mixers}
    for mixer, one in chosen.items():
        one.check()
        run = out / mixer
        if (run / RECIPE).exists() and recipe_of(run).as_dict() != one.as_dict():
            raise ValueError(f"{run} was trained by another recipe: give another --out")
    corpus = _prepared(recipe, say)
    held_out = validation_part(recipe, corpus)
    if held_out is None or held_out.tokens < 2:
        raise ValueError(
            f"data.path {recipe.data.path} holds nothing out to compare on: prepare it with "
            "--validation, or set data.validation_path"
        )
    for mixer, one in chosen.items():
        run = out / mixer
        if max(checkpoints.steps_in(run), default=0) >= one.steps:
            continue
        say(f"\n{mixer}: {run}")
        try:
            train(one, run, resume=(run / RECIPE).exists())
        except Interrupted:
            say(f"stopped in {run}; the same command goes on")
            raise
        except Diverged as diverged:  # a result like any other, which the table shows
            say(str(diverged))
    vocabulary = corpus.tokenizer().vocab_size
    rows = [_row(mixer, one, out / mixer, vocabulary) for mixer, one in chosen.items()]
    counted = None
    if vocabulary <= LARGEST_VOCABULARY:
        counted = bigram_loss(
            corpus.train, held_out, vocabulary, recipe.data.context, recipe.log.validation_tokens
        )
    lines = _table(rows, counted)
    result = {"recipe": recipe.as_dict(), "bigram_loss": counted, "rows": rows}
    write_json(out / "comparison.json", result)
    write_whole(out / "comparison.md", ("\n".join(lines) + "\n").encode())
    level = {} if counted is None else {"bigram counts": counted}
    draw_losses([out / mixer for mixer in mixers], out / "comparison.png", levels=level)
    for line in lines:
        say(line)
    say(f"\nwritten to {out}/comparison.md, .json and .png")
    return result


def _prepared(recipe: Recipe, say: Callable[[str], None]) -> Corpus:
    """The recipe's text; if it is missing, it is prepared from the recipe's sources."""
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


def _row(mixer: str, recipe: Recipe, run: Path, vocabulary: int) -> Row:
    records = read_metrics(run)
    trained = [record for record in records if "loss" in record]
    last = [record for record in records if "validation_loss" in record][-1]
    speed = median_high(record["timing"]["tokens_per_second"] for record in trained)
    return {
        "mixer": mixer,
        "parameters": count_parameters(recipe.model.config(vocabulary)),
        "first_loss": trained[0]["loss"],
        "last_loss": trained[-1]["loss"],
        "validation_loss": last["validation_loss"],
        "skipped_steps": trained[-1].get("bad_steps", 0),
        "tokens_per_second": speed,
    }


def _table(rows: list[Row], counted: float | None) -> list[str]:
    against = [] if counted is None else ["against bigram counts"]
    heads = ["mixer", "parameters", "first loss", "last loss", "validation", *against,
             "skipped steps", "tokens/s"]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in sorted(rows, key=lambda row: row["validation_loss"]):
        trained = (row["first_loss"], row["last_loss"])
        held_out = row["validation_loss"]
        difference = [] if counted is None else [f"{held_out - counted:+.3f}"]
        cells = [row["mixer"], f"{row['parameters']:,}",
                 *("not finite" if loss is None else f"{loss:.3f}" for loss in trained),
                 f"{held_out:.3f}", *difference, str(row["skipped_steps"]),
                 f"{row['tokens_per_second']:,.0f}"]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    if counted is not None:
        lines.append(f"| bigram counts of the training text | | | | {counted:.3f} | | | |")
    return ["Loss in nats per token.", "", *lines]


def bigram_loss(train: Any, validation: Any, vocabulary: int, context: int, tokens: int) -> float:
    """The mean loss of the count model in nats per token.

    It counts the pairs of all of `train`, and is measured on the windows of `validation` that
    training validates on.

    Raises:
        ValueError: the vocabulary is too large to count pairs of.
    """
    if vocabulary > LARGEST_VOCABULARY:
        raise ValueError(
            f"pairs are counted for vocabularies of up to {LARGEST_VOCABULARY}; got {vocabulary}"
        )
    pairs, single = _count(train, vocabulary)
    share = (single + 0.5) / (single + 0.5).sum()
    context = min(context, validation.tokens - 1)
    starts = validation_windows(validation, context, tokens)
    batch = assemble([(validation, start) for start in starts], context)
    known = batch.targets != IGNORED
    before, after = batch.input_ids[known].numpy(), batch.targets[known].numpy()
    counted, seen = pairs[before * vocabulary + after], single[before]
    losses = [
        -np.log((counted + strength * share[after]) / (seen + strength)).mean()
        for strength in STRENGTHS
    ]
    return float(min(losses))


def _count(stream: Any, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each pair occurs inside a document, and each token as the first of a pair."""
    pairs = np.zeros(vocabulary * vocabulary, dtype=np.int64)
    ends = np.asarray(stream.ends, dtype=np.int64)
    for start in range(0, stream.tokens - 1, _READ):
        ids = stream.read(start, min(start + _READ + 1, stream.tokens)).astype(np.int64)
        coded = ids[:-1] * vocabulary + ids[1:]
        last = ends[(ends > start) & (ends <= start + len(coded))] - start - 1
        pairs += np.bincount(np.delete(coded, last), minlength=len(pairs))
    return pairs, pairs.reshape(vocabulary, vocabulary).sum(1)


def draw_losses(
    runs: list[Path], out: Path, levels: dict[str, float] | None = None
) -> dict[str, dict[str, Any]]:
    """Draw the training and validation loss of runs over tokens to a PNG; return the curves.

    levels: losses by name to compare with, drawn as horizontal lines.

    Raises:
        FileNotFoundError: a run has no metrics.
    """
    curves = {str(run): _curves(run) for run in runs}
    names = [run.name for run in runs]
    with figure(out, figsize=(8, 5)) as axes:
        for number, (run, name) in enumerate(zip(runs, names)):
            curve, colour = curves[str(run)], f"C{number % 10}"
            label = name if names.count(name) == 1 else str(run)
            axes.plot(*curve["training"], color=colour, linewidth=1.2, label=label)
            if curve["validation"][0]:
                once = "validation" if number == len(runs) - 1 else None
                axes.plot(*curve["validation"], "o--", color=colour, markersize=4, label=once)
        for name, level in (levels or {}).items():
            axes.axhline(level, color="black", linewidth=1, linestyle=":", label=name)
        axes.set(xlabel="training tokens", ylabel="loss, nats per token", title="Loss")
        axes.grid(alpha=0.3)
        axes.legend()
    return curves


def _curves(run: Path) -> dict[str, Any]:
    """(tokens, losses) of training and of validation."""
    records = read_metrics(run)
    trained = [r for r in records if r.get("loss") is not None]
    if not trained:
        raise ValueError(f"{run} has no losses yet")
    per_step = trained[-1]["tokens"] / trained[-1]["step"]
    training = [(r["tokens"], r["loss"]) for r in trained]
    validation = [
        (r["step"] * per_step, r["validation_loss"]) for r in records if "validation_loss" in r
    ]
    return {
        "training": tuple(zip(*training)),
        "validation": tuple(zip(*validation)) if validation else ((), ()),
    }
