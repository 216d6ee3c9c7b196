"""Runs side by side: variants of a model trained by one recipe, and the loss curves of any runs.

A comparison is a recipe with a section of its own:

    [compare]
    rates = [1e-3, 3e-3]          # each variant takes the one that is best on validation
    seeds = [0, 1, 2]
    contexts = [512, 2048]

    [compare.variants.trellis]    # a mixer of that name, as it is by default

    [compare.variants.small]
    mixer = "trellis"
    mixer_config = {slots = 16}
    seeds = [0]                   # in place of those of [compare]

It also has the loss of a count model of token pairs, which a model that learns must beat:

    p(b | a) = (count(a b) + strength p(b)) / (count(a) + strength)

p(b) is the share of b among the tokens that another token follows. The strength is the one that
does best on the held-out text itself, so that the count model is at its best.
"""

from __future__ import annotations

import contextlib
import copy
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median_high, stdev
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import checks
from ..data import prepare_corpus
from ..data.batches import assemble, validation_windows
from ..data.shards import Corpus, open_corpus
from ..figures import figure
from ..files import write_json, write_whole
from ..mixers import MIXERS
from ..models.loss import IGNORED
from ..models.presets import count_parameters, state_bytes
from ..training import checkpoint as checkpoints
from ..training.loop import Diverged, Interrupted, TrainingStopped
from ..training.metrics import perplexity_of, read_metrics
from ..training.recipe import Recipe, build, from_dict, read_table
from ..training.run import RECIPE, recipe_of, train, validation_part

#: The share of documents that is held out, if the comparison prepares the text itself.
VALIDATION = 0.03
STRENGTHS = (0.3, 1, 3, 10, 30, 100, 300, 1000)
#: Pairs are counted in a table of vocabulary x vocabulary entries.
LARGEST_VOCABULARY = 8192
_READ = 1 << 22  # tokens that are counted at a time


#: One run's line in comparison.json; a loss is None if it was not finite.
Row = dict[str, Any]
Say = Callable[[str], None]


@dataclass
class Variant:
    """[compare.variants.NAME]: what is compared under a name.

    mixer: a mixer's name, or a list of names that is repeated over the layers; by default NAME.
    mixer_config: its fields; with several mixers a table for each.
    rates, seeds, contexts: in place of those of [compare].
    """

    mixer: str | list[str] = ""
    mixer_config: dict[str, Any] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)


@dataclass
class CompareSection:
    """[compare]: what is trained.

    variants: a table for each name; without any, all mixers as they are by default.
    rates: learning rates. All are tried with the first seed at the first context, and the best on
        validation is used for the rest. By default the recipe's.
    seeds, contexts: by default the recipe's. With several contexts the recipe must have
        train.batch_tokens, so that a step has equally many tokens at each.
    """

    variants: dict[str, Any] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)


class Run(NamedTuple):
    """One training run of a comparison."""

    variant: str
    context: int
    rate: float
    seed: int


class Comparison:
    """A recipe, and the variants that are trained by it."""

    def __init__(self, recipe: Recipe, section: CompareSection | None = None):
        """Raises ValueError if a name, a number or the recipe does not fit."""
        section = section or CompareSection()
        if recipe.model.mixer_config:
            raise ValueError(
                "a comparison takes mixers and their fields from [compare.variants], so the "
                f"recipe's model.mixer_config must be empty; got {recipe.model.mixer_config}"
            )
        self.recipe = recipe
        self.variants: dict[str, Variant] = {}
        for name, table in (section.variants or {mixer: {} for mixer in MIXERS}).items():
            self.variants[name] = self._variant(name, table, section)
        for name in self.variants:
            for run in self.runs(name):
                self.recipe_of(run).check()

    def _variant(self, name: str, table: Any, section: CompareSection) -> Variant:
        where = f"compare.variants.{name}"
        if not name or Path(name).name != name or name.startswith("."):
            raise ValueError(f"{where}: the name must be that of a folder")
        if not isinstance(table, Mapping):
            raise ValueError(f"{where} must be a section; got {table!r}")
        given = build(Variant, table, f"{where}.")
        data, train = self.recipe.data, self.recipe.train
        variant = Variant(
            given.mixer or name, given.mixer_config,
            given.rates or section.rates or [train.learning_rate],
            given.seeds or section.seeds or [train.seed],
            given.contexts or section.contexts or [data.context],
        )  # fmt: skip
        for field_name in ("rates", "seeds", "contexts"):
            values = getattr(variant, field_name)
            if len(set(values)) < len(values):
                raise ValueError(f"compare.{field_name} must differ from one another; got {values}")
        if variant.contexts != [data.context] and train.batch_tokens is None:
            raise ValueError(
                "compare.contexts needs train.batch_tokens in place of train.rows, so that a step "
                "has equally many tokens at every context"
            )
        return variant

    def only(self, names: Sequence[str]) -> Comparison:
        """The same comparison of the named variants; ValueError if there is no such variant."""
        for name in names:
            if name not in self.variants:
                hint = checks.did_you_mean(name, self.variants)
                known = ", ".join(self.variants)
                raise ValueError(f"mixers must be among {known}; got {name!r}{hint}")
        part = copy.copy(self)
        part.variants = {name: self.variants[name] for name in names}
        return part

    def recipe_of(self, run: Run) -> Recipe:
        recipe, variant = self.recipe, self.variants[run.variant]
        return replace(
            recipe,
            model=replace(recipe.model, mixer=variant.mixer, mixer_config=variant.mixer_config),
            data=replace(recipe.data, context=run.context),
            train=replace(recipe.train, learning_rate=run.rate, seed=run.seed),
        )

    def folder(self, run: Run) -> str:
        """VARIANT for a variant with a single run, else such as VARIANT/1024-0.003-0."""
        if len(self.runs(run.variant)) == 1:
            return run.variant
        return f"{run.variant}/{run.context}-{run.rate:g}-{run.seed}"

    def search(self, name: str) -> list[Run]:
        """The runs of a variant of which the best decides the learning rate of all others."""
        variant = self.variants[name]
        return [Run(name, variant.contexts[0], rate, variant.seeds[0]) for rate in variant.rates]

    def runs(self, name: str) -> list[Run]:
        """Every run that a variant may need, at each of its learning rates."""
        variant = self.variants[name]
        return [
            Run(name, context, rate, seed)
            for context in variant.contexts for seed in variant.seeds for rate in variant.rates
        ]  # fmt: skip

    def chosen(self, name: str, rows: Mapping[Run, Row]) -> list[Run]:
        """The runs of a variant at its best rate; none before all of its rates were tried."""
        search = self.search(name)
        if any(run not in rows for run in search):
            return []
        rate = min(search, key=lambda run: _order(rows[run]["validation_loss"])).rate
        return [run for run in self.runs(name) if run.rate == rate]

    def missing(self, rows: Mapping[Run, Row]) -> list[Run]:
        """The runs that can be trained next: first all searches, then seed by seed."""
        runs = [run for name in self.variants for run in self.search(name)]
        rest = [
            (variant.contexts.index(run.context) + variant.seeds.index(run.seed), place, run)
            for place, (name, variant) in enumerate(self.variants.items())
            for run in self.chosen(name, rows)
        ]
        runs += [run for _, _, run in sorted(rest)]
        return [run for run in dict.fromkeys(runs) if run not in rows]


def load_comparison(path: Path, settings: Sequence[str] = ()) -> Comparison:
    """A comparison from a recipe with or without [compare], and settings such as
    "compare.seeds=[0]".

    Raises:
        ValueError: a key is unknown, or a value has the wrong type or is out of range.
    """
    table = read_table(path, settings)
    section = build(CompareSection, table.pop("compare", {}), "compare.")
    return Comparison(from_dict(table), section)


def compare(comparison: Comparison, out: Path, say: Say, workers: int = 1) -> dict[str, Any]:
    """Train all runs of a comparison into OUT/VARIANT/ and write OUT/comparison.{md,json,png}.

    A finished run is not trained again, and an interrupted one is resumed. The table and the
    records are written anew after every run. If the recipe's text is missing, it is prepared from
    the recipe's sources.

    workers: runs trained at the same time; above 1, each in a process with its share of the cores,
        which prints to a .log file beside the run's folder.

    Raises:
        ValueError, FileNotFoundError: the recipe and what is there do not fit together, or
            something is missing.
        TrainingStopped: a run ended with an error, or a signal asked to stop.
    """
    recipe = comparison.recipe
    if not comparison.variants:
        raise ValueError("mixers must name at least one")
    checks.at_least("workers", workers, 1)
    corpus = _prepared(recipe, say)
    held_out = validation_part(recipe, corpus)
    if held_out is None or held_out.tokens < 2:
        raise ValueError(
            f"data.path {recipe.data.path} holds nothing out to compare on: prepare it with "
            "--validation, or set data.validation_path"
        )
    vocabulary = corpus.tokenizer().vocab_size
    rows: dict[Run, Row] = {}
    # What is finished already. Every rate is asked for, since no rate is chosen yet.
    for name in comparison.variants:
        for run in comparison.runs(name):
            one, folder = comparison.recipe_of(run), out / comparison.folder(run)
            if (folder / RECIPE).exists() and recipe_of(folder).as_dict() != one.as_dict():
                raise ValueError(f"{folder} was trained by another recipe: give another --out")
            if max(checkpoints.steps_in(folder), default=0) >= one.steps:
                rows[run] = _row(run, one, folder, vocabulary)
    counted = None
    if vocabulary <= LARGEST_VOCABULARY:
        counted = bigram_loss(
            corpus.train, held_out, vocabulary, recipe.data.context, recipe.log.validation_tokens
        )
    trained = _train_here if workers == 1 else _train_beside
    with contextlib.closing(trained(comparison, out, rows, say, workers)) as finished:
        for run in finished:
            rows[run] = _row(
                run, comparison.recipe_of(run), out / comparison.folder(run), vocabulary
            )
            _write(comparison, out, rows, counted)
    result = _write(comparison, out, rows, counted)
    best = [
        out / comparison.folder(comparison.chosen(name, rows)[0]) for name in comparison.variants
    ]
    level = {} if counted is None else {"bigram counts": counted}
    draw_losses(best, out / "comparison.png", levels=level, names=list(comparison.variants))
    written = "comparison.md, .json and .png"
    if any(len(variant.contexts) > 1 for variant in comparison.variants.values()):
        _draw_contexts(result["table"], out / "contexts.png")
        written += " and contexts.png"
    for line in (out / "comparison.md").read_text().splitlines():
        say(line)
    say(f"\nwritten to {out}/{written}")
    return result


def _order(loss: float | None) -> float:
    return math.inf if loss is None or math.isnan(loss) else loss


def _train_here(
    comparison: Comparison, out: Path, rows: dict[Run, Row], say: Say, workers: int
) -> Generator[Run, None, None]:
    """Trains what is missing, one run after the other, in this process."""
    while missing := comparison.missing(rows):
        run = missing[0]
        folder = out / comparison.folder(run)
        say(f"\n{run.variant}: {folder}")
        try:
            train(comparison.recipe_of(run), folder, resume=(folder / RECIPE).exists())
        except Interrupted:
            say(f"stopped in {folder}; the same command goes on")
            raise
        except Diverged as diverged:  # a result like any other, which the table shows
            say(str(diverged))
        yield run


def _train_beside(
    comparison: Comparison, out: Path, rows: dict[Run, Row], say: Say, workers: int
) -> Generator[Run, None, None]:
    """Trains what is missing, some runs at a time, each in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // workers)
    at_work: dict[Run, Any] = {}
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        asked.append(number)

    handlers = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while True:
            for run in comparison.missing(rows):
                if len(at_work) == workers or asked:
                    break
                if run not in at_work:
                    folder = out / comparison.folder(run)
                    folder.parent.mkdir(parents=True, exist_ok=True)
                    say(f"begins: {folder}")
                    arguments = comparison.recipe_of(run), folder, threads
                    at_work[run] = spawn.Process(target=_worker, args=arguments)
                    at_work[run].start()
            if not at_work:
                break
            for process in at_work.values() if asked else ():
                process.terminate()  # the run saves a checkpoint and ends
            sentinels = [process.sentinel for process in at_work.values()]
            multiprocessing.connection.wait(sentinels, timeout=1)
            for run in [run for run, process in at_work.items() if not process.is_alive()]:
                process, folder = at_work.pop(run), out / comparison.folder(run)
                process.join()
                if process.exitcode == 0:
                    yield run
                    say(f"finished: {folder}, {_said(rows[run]['validation_loss'])}")
                elif not asked:
                    raise TrainingStopped(
                        f"{folder} ended with code {process.exitcode}: {_log(folder)} says why"
                    )
    finally:
        for process in at_work.values():
            process.terminate()
            process.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if asked:
        say(f"stopped in {out}; the same command goes on")
        raise Interrupted("stopped", asked[0])


def _log(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def _worker(recipe: Recipe, folder: Path, threads: int) -> None:
    """Trains a run in a process of its own, which prints to FOLDER.log."""
    with _log(folder).open("ab") as file:
        for output in (sys.stdout, sys.stderr):
            output.flush()
            os.dup2(file.fileno(), output.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process passes signals on
    torch.set_num_threads(threads)
    try:
        train(recipe, folder, resume=(folder / RECIPE).exists())
    except Diverged as diverged:
        print(diverged)
    except (TrainingStopped, ValueError, OSError) as stopped:
        print(stopped)
        sys.exit(getattr(stopped, "exit_code", 1))


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


def _row(run: Run, recipe: Recipe, folder: Path, vocabulary: int) -> Row:
    """What is known of a run after training.

    The validation loss is None if there is none of the last step: a run that was given up early
    does not count with what it had reached before.
    """
    records = read_metrics(folder)
    trained = [record for record in records if "loss" in record]
    validated = [r for r in records if r.get("validation_loss") is not None]
    finished = bool(validated) and validated[-1]["step"] == recipe.steps
    config = recipe.model.config(vocabulary)
    return {
        **run._asdict(),
        "mixer": recipe.model.mixer,
        "mixer_config": recipe.model.mixer_config,
        "parameters": count_parameters(config),
        "state_bytes": state_bytes(config, run.context),
        "tokens": recipe.steps * recipe.rows * run.context,
        "first_loss": trained[0]["loss"],
        "last_loss": trained[-1]["loss"],
        "validation_loss": validated[-1]["validation_loss"] if finished else None,
        "validation": [[r["step"], r["validation_loss"]] for r in validated],
        "skipped_steps": trained[-1].get("bad_steps", 0),
        "tokens_per_second": median_high(r["timing"]["tokens_per_second"] for r in trained),
    }


def _write(
    comparison: Comparison, out: Path, rows: dict[Run, Row], counted: float | None
) -> dict[str, Any]:
    """Writes comparison.json and comparison.md of the runs that are finished."""
    table = []
    for name, variant in comparison.variants.items():
        chosen = [run for run in comparison.chosen(name, rows) if run in rows]
        for context in variant.contexts:
            at = [rows[run] for run in chosen if run.context == context]
            if at:
                table.append(_summary(at))
    result = {
        "recipe": comparison.recipe.as_dict(),
        "bigram_loss": counted,
        "table": table,
        "rows": list(rows.values()),
    }
    write_json(out / "comparison.json", result)
    lines = _table(table, counted)
    write_whole(out / "comparison.md", ("\n".join(lines) + "\n").encode())
    return result


def _summary(rows: list[Row]) -> Row:
    """The runs of a variant at one context, which differ in the seed: mean and spread."""
    names = ("variant", "context", "rate", "parameters", "state_bytes", "tokens")
    losses = [row["validation_loss"] for row in rows]
    finite = all(math.isfinite(_order(loss)) for loss in losses)
    return {
        **{name: rows[0][name] for name in names},
        "seeds": len(rows),
        "validation_loss": fmean(losses) if finite else None,
        "deviation": stdev(losses) if finite and len(losses) > 1 else None,
        "skipped_steps": sum(row["skipped_steps"] for row in rows),
        "tokens_per_second": median_high(row["tokens_per_second"] for row in rows),
    }


def _said(loss: float | None, deviation: float | None = None) -> str:
    if not math.isfinite(_order(loss)):
        return "not finite"
    return f"{loss:.3f}" if deviation is None else f"{loss:.3f} ± {deviation:.3f}"


def _table(table: list[Row], counted: float | None) -> list[str]:
    heads = ["variant", "context", "validation", "seeds", "rate", "parameters", "state",
             "skipped steps", "tokens/s"]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in sorted(table, key=lambda row: (row["context"], _order(row["validation_loss"]))):
        cells = [row["variant"], str(row["context"]),
                 _said(row["validation_loss"], row["deviation"]), str(row["seeds"]),
                 f"{row['rate']:g}", f"{row['parameters']:,}",
                 f"{row['state_bytes'] / 1024:,.0f} KiB", str(row["skipped_steps"]),
                 f"{row['tokens_per_second']:,.0f}"]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    if counted is not None:
        lines.append(f"| bigram counts of the training text | | {counted:.3f} | | | | | | |")
    note = "Loss in nats per token; ± is the standard deviation over seeds."
    return [note, "", *lines]


def _draw_contexts(table: list[Row], path: Path) -> None:
    """Perplexity over the context that models were trained and validated at."""
    with figure(path, figsize=(7, 4.5)) as axes:
        contexts = sorted({row["context"] for row in table})
        for name in dict.fromkeys(row["variant"] for row in table):
            mine = sorted((row for row in table
                           if row["variant"] == name and row["validation_loss"] is not None),
                          key=lambda row: row["context"])  # fmt: skip
            losses = [row["validation_loss"] for row in mine]
            axes.plot([row["context"] for row in mine], [perplexity_of(x) for x in losses], "o-",
                      label=name)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [str(context) for context in contexts])
        axes.set(xlabel="tokens of context", ylabel="perplexity", title="Perplexity over context")
        axes.grid(alpha=0.3)
        axes.legend()


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
    runs: list[Path],
    out: Path,
    levels: dict[str, float] | None = None,
    names: list[str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Draw the training and validation loss of runs over tokens to a PNG; return the curves.

    levels: losses by name to compare with, drawn as horizontal lines.
    names: what the runs are called; by default as their folders.

    Raises:
        FileNotFoundError: a run has no metrics.
    """
    curves = {str(run): _curves(run) for run in runs}
    names = names or [run.name for run in runs]
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
