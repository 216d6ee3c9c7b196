"""`trellis eval scaling`: perplexity over the FLOPs that training took.

The FLOPs of a run are the sum over its steps of tokens x training_flops(model, context of the
step), by the formulas of models/presets.py. Steps that were skipped for a bad gradient count too:
they were computed.

Two runs were validated alike if they read the same windows of the same text: the held-out part of
the same corpus, which the checkpoint names by a hash, or the corpus that is now at the recipe's
`data.validation_path`; with the same context and `log.validation_tokens`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import figures
from ..data.shards import open_corpus
from ..data.tokenizer import load_tokenizer
from ..files import write_json
from ..mixers import mixer_config
from ..models.config import TrellisConfig
from ..models.presets import training_flops, weightless
from ..training import checkpoint as checkpoints
from ..training.metrics import FILE, perplexity_of, read_metrics
from ..training.optimization import context_at
from ..training.recipe import Recipe
from ..training.run import RECIPE, TOKENIZER, recipe_of
from .models import names_of, open_model
from .ppl import documents, encode, job
from .runner import Records, Report, Table, check_writable, digest, hash_of, provenance
from .scoring import BATCH_TOKENS

UNITS = {"perplexity": "perplexity per token", "bits_per_byte": "bits per byte"}
#: One run in the table and in the file of numbers.
Row = dict[str, Any]


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
) -> Report:
    """Reads the runs' recorded validations, or measures their newest checkpoints on `data`.

    Only perplexities on `data` are kept as records; FLOPs and curves are counted on every call. The
    report's `found` is the content of scaling-HASH.json: the runs and the fitted laws. Raises
    ValueError if runs cannot be compared.
    """
    if bool(data) != (context is not None):
        raise ValueError("--data and --context go together: the text, and how much is read at once")
    options = {"document-bytes": document_bytes, "limit": limit, "batch-tokens": batch_tokens}
    for name, value in options.items():
        if value is not None and not data:
            raise ValueError(
                f"--{name} {value} needs --data: recorded validations are taken as they are"
            )
    figures.check()
    paths = list({path.resolve(): path for path in runs}.values())
    trainings = [read_training(path) for path in paths]
    same_tokens = len({training.tokenizer_sha256 for training in trainings}) == 1
    for training in trainings:
        if not data:
            _check_validation(training, trainings)
        elif not bits_per_byte and training.tokenizer_sha256 != trainings[0].tokenizer_sha256:
            raise ValueError(
                f"{paths[0]} and {training.path} have different tokenizers, so that perplexities "
                "per token cannot be compared: add --bits-per-byte"
            )
    names = names_of([str(path) for path in paths])
    rows: list[Row] = [
        {
            "name": name,
            "path": str(training.path),
            "mixer": training.mixer,
            "variant": variant,
            "parameters": training.parameters,
            "step": training.step,
            "recipe": training.recipe.as_dict(),
        }
        for training, variant, name in zip(trainings, variants(trainings), names)
    ]
    texts = documents(data, limit, document_bytes) if data else []
    check_writable(out, out)
    setting: dict[str, Any] = {}
    if data:
        setting = {
            "data_sha256": hash_of(texts),
            "documents": len(texts),
            "context": context,
            "windows": "disjoint",
        }
    records = Records(out, "scaling")
    for row, training in zip(rows, trainings):
        if not data:
            row |= {"validation": training.validation_text, "curve": training.curve()}
        else:
            # The step that FLOPs are counted up to: a run may go on meanwhile.
            model = open_model(str(training.path), device, name=row["name"], step=training.step)
            encoded = [encode(model, text) for text in texts]
            note = {"data": list(data)}
            look = job(model, encoded, setting, note, batch_tokens or BATCH_TOKENS)
            record = records.measured(model, look)
            result = record["result"]
            row |= {
                "setting": setting,
                "weights_sha256": record["model"]["weights_sha256"],
                "curve": [training.point(training.step, result["loss"], result["bits_per_byte"])],
            }
        row["final"] = row["curve"][-1]
    unit, fitted = ("bits_per_byte",) * 2 if bits_per_byte else ("perplexity", "loss")
    groups = by_variant(rows)
    fits, laws = {}, []
    for variant, group in groups.items():
        # The law through the ends of all runs of a variant.
        law = fit([r["final"]["flops"] for r in group], [r["final"][fitted] for r in group])
        if law is not None:
            fits[variant] = law._asdict()
            equation = f"{fitted.replace('_', ' ')} = {law.a:.4g} x FLOPs^{-law.b:.4f}"
            laws.append(f"{variant}: {equation}")
    result = {
        "runs": rows,
        "fits": fits,
        "fitted": "bits per byte" if bits_per_byte else "loss, nats per token",
        "made_by": provenance(),
    }
    stem = f"scaling-{digest([sorted(str(path.resolve()) for path in paths), unit, setting])}"
    written, picture = out / f"{stem}.json", out / f"{stem}.png"
    _draw(picture, groups, unit)
    write_json(written, result)
    return Report(result, [_table(rows, unit, same_tokens), *laws], [written, picture])


@dataclass
class Training:
    """What a run's folder says of its training, up to its newest checkpoint."""

    path: Path
    recipe: Recipe
    #: The mixer of all layers, or the repeated pattern of a hybrid: "trellis+transformer".
    mixer: str
    #: All fields of the mixers' configurations that change what is computed.
    fields: dict[str, Any]
    #: The names of those that the recipe sets; defaults of other fields may follow from them.
    given: set[str]
    parameters: int
    step: int
    #: FLOPs after each step; entry 0, before the first step, is 0.
    flops: list[float]
    #: Records of metrics.jsonl that hold a validation.
    validations: list[dict[str, Any]]
    tokenizer_sha256: str
    #: What the perplexities of validations depend on beside the model. `text` is None where the
    #: corpus is no longer there to be hashed.
    validation_text: dict[str, Any]

    def tokens(self, step: int) -> int:
        return step * self.recipe.rows * self.recipe.data.context

    def curve(self) -> list[dict[str, float]]:
        """A point for every validation, oldest first."""
        return [
            self.point(r["step"], r["validation_loss"], r["validation_bits_per_byte"])
            for r in self.validations
        ]

    def point(self, step: int, loss: float, bits_per_byte: float) -> dict[str, float]:
        return {
            "step": step,
            "tokens": self.tokens(step),
            "flops": self.flops[step],
            "loss": loss,
            "perplexity": perplexity_of(loss),
            "bits_per_byte": bits_per_byte,
        }


def read_training(run: Path) -> Training:
    """Reads everything about a run except its weights."""
    if not (run / RECIPE).is_file() and (run / "config.json").is_file():
        raise FileNotFoundError(
            f"{run} is a model without a record of its training (no {RECIPE}): give the run that "
            "it was exported from"
        )
    recipe = recipe_of(run)
    records = read_metrics(run)
    saved = checkpoints.open_checkpoint(run, verify=False)
    config = saved.config()
    model = weightless(config)
    steps = max([saved.step, *(record["step"] for record in records)])
    contexts = contexts_of(recipe, records, steps)
    of_step = {
        context: recipe.rows * recipe.data.context * training_flops(model, context)
        for context in set(contexts)
    }
    path = recipe.data.validation_path
    text = f"held out of {saved.content['data']}" if path is None else None
    if path is not None:
        with suppress(FileNotFoundError):
            text = open_corpus(path).fingerprint
    pattern = [config.mixer] if isinstance(config.mixer, str) else list(config.mixer)
    return Training(
        path=run,
        recipe=recipe,
        mixer="+".join(pattern if len(set(pattern)) > 1 else pattern[:1]),
        fields=_fields(config, lambda name, given: asdict(mixer_config(name, given))),
        given=set(_fields(config, lambda name, given: given)),
        parameters=sum(p.numel() for p in model.parameters()),
        step=saved.step,
        flops=[0.0, *itertools.accumulate(of_step[context] for context in contexts)],
        validations=[record for record in records if "validation_loss" in record],
        tokenizer_sha256=load_tokenizer(run / TOKENIZER).sha256,
        validation_text={
            "text": text,
            "context": recipe.data.context,
            "validation_tokens": recipe.log.validation_tokens,
        },
    )


def _fields(
    config: TrellisConfig, of: Callable[[str, dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """The fields that `of` gives of each mixer, in one table.

    Where a model has several mixers, a field's name is preceded by its mixer's: "abc.slots".
    """
    several = len({name for name, _ in config.layer_mixers()}) > 1
    return {
        f"{name}.{field}" if several else field: value
        for name, given in config.layer_mixers()
        for field, value in of(name, given).items()
        if field != "backend"
    }


def contexts_of(recipe: Recipe, records: Sequence[dict[str, Any]], steps: int) -> list[int]:
    """The context of every step: that of the schedule, which depends on the number of steps.

    A run that was resumed with another number of steps had another schedule before. Where the
    metrics disagree with the schedule, a step has the context of the first record at or after it.
    """
    noted = {record["step"]: record["context"] for record in records if "context" in record}
    found = []
    other = None  # the context of the next record, if the schedule has another one there
    for step in range(steps, 0, -1):
        planned = context_at(recipe, step - 1)
        if step in noted:
            other = None if noted[step] == planned else noted[step]
        found.append(other or planned)
    return found[::-1]


def _check_validation(run: Training, runs: Sequence[Training]) -> None:
    """Raises ValueError unless a run has validations, on the same text and in the same way as the
    first of all `runs`."""
    instead = "with --data and --context"
    if not run.validations:
        raise ValueError(
            f"{run.path} has no validation in its {FILE}: measure its checkpoint {instead}"
        )
    if len(runs) > 1 and run.validation_text["text"] is None:
        raise ValueError(
            f"{run.path} was validated on {run.recipe.data.validation_path}, which is not there "
            f"to be compared: put it back, or measure the runs on one text {instead}"
        )
    for key, value in run.validation_text.items():
        first = runs[0].validation_text[key]
        if value != first:
            raise ValueError(
                f"{runs[0].path} and {run.path} were not validated alike: {key} is "
                f"{first!s:.30} and {value!s:.30}. Measure them on one text {instead}"
            )


def variants(runs: Sequence[Training]) -> list[str]:
    """The mixer of every run, with the fields in which its runs differ, such as "gsa (slots=8)"."""
    found = []
    for run in runs:
        alike = [other for other in runs if other.mixer == run.mixer]
        given = set().union(*(other.given for other in alike))
        said = [
            f"{name}={'+'.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
            for name, value in run.fields.items()
            if name in given and any(other.fields[name] != value for other in alike)
        ]
        found.append(f"{run.mixer} ({', '.join(said)})" if said else run.mixer)
    return found


class PowerLaw(NamedTuple):
    """loss = a * FLOPs^-b"""

    a: float
    b: float


def fit(flops: Sequence[float], losses: Sequence[float]) -> PowerLaw | None:
    """A fit by least squares of the logarithms; None for fewer than three different FLOPs."""
    if len(set(flops)) < 3:
        return None
    slope, level = np.polyfit(np.log(flops), np.log(losses), 1).tolist()
    return PowerLaw(math.exp(level), -slope)


def by_variant(rows: list[Row]) -> dict[str, list[Row]]:
    """The runs of each variant of a mixer, in the order of their FLOPs."""
    groups: dict[str, list[Row]] = {row["variant"]: [] for row in rows}
    for row in sorted(rows, key=lambda row: row["final"]["flops"]):
        groups[row["variant"]].append(row)
    return groups


def _table(rows: list[Row], unit: str, same_tokens: bool) -> Table:
    """same_tokens: whether perplexities per token can be compared; else they are left out."""
    shown = [one for one in UNITS if one != "perplexity" or same_tokens]
    shown.sort(key=lambda one: one != unit)
    cells = [
        [
            row["name"], row["variant"], f"{row['parameters']:,}", f"{row['final']['tokens']:,}",
            f"{row['final']['flops']:.3e}", *(f"{row['final'][one]:.3f}" for one in shown),
        ]
        for row in rows
    ]  # fmt: skip
    heads = ["run", "mixer", "parameters", "tokens", "FLOPs", *(UNITS[one] for one in shown)]
    return Table(f"{UNITS[unit]} over training FLOPs", heads, cells)


def _draw(path: Path, groups: dict[str, list[Row]], unit: str) -> None:
    """Every run as a thin curve, and a strong line through the ends of all runs of a variant."""
    said = ["large dots: a run's end"]
    if any(len(row["curve"]) > 1 for rows in groups.values() for row in rows):
        said.insert(0, "small dots on pale lines: validations of a run")
    if any(len(rows) > 1 for rows in groups.values()):
        said.append("strong lines: all runs of a mixer")
    with figures.figure(path, figsize=(9, 4.5)) as axis:
        for number, (name, rows) in enumerate(groups.items()):
            colour = f"C{number % 10}"
            for row in rows:
                x, y = ([point[key] for point in row["curve"]] for key in ("flops", unit))
                axis.plot(x, y, ".-", color=colour, alpha=0.35, linewidth=1, markersize=3)
            x, y = ([row["final"][key] for row in rows] for key in ("flops", unit))
            axis.plot(x, y, "o-", color=colour, label=name)
        axis.set(xscale="log", yscale="log", xlabel="training FLOPs", ylabel=UNITS[unit])
        _plain_ticks(axis)
        axis.grid(alpha=0.3, which="both")
        axis.set_title("; ".join(said), loc="left", fontsize=10)
        axis.figure.legend(loc="outside right upper", frameon=False)


def _plain_ticks(axis: Any) -> None:
    """Ticks at plain numbers such as 20 and 120, enough of them also where values lie close."""
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
