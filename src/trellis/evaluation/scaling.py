"""What training a run took, and how its perplexity fell meanwhile.

FLOPs of a run: the sum over its steps of tokens x training_flops(model, context of the step), the
formulas of models/flops.py. Steps that were skipped count too: they were computed.

Two runs were validated alike if they read the same windows of the same text: the part of the same
corpus that was held out, which the checkpoint knows, or the corpus that is now at the recipe's
validation_path; with the same context and validation_tokens.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..data.shards import open_corpus
from ..data.tokenizer import load_tokenizer
from ..mixers import mixer_config
from ..models.config import TrellisConfig
from ..models.presets import training_flops, weightless
from ..training import checkpoint as checkpoints
from ..training.metrics import FILE, perplexity_of, read_metrics
from ..training.optimization import context_at
from ..training.recipe import Recipe
from ..training.run import RECIPE, TOKENIZER, recipe_of


@dataclass
class Training:
    """What a run's folder says of its training, up to its newest checkpoint."""

    path: Path
    recipe: Recipe
    #: The mixers of the layers, as often as the pattern has them.
    mixer: str
    #: All fields of the mixers' configurations that change what is computed, and the names of those
    #: that the recipe sets: defaults of others may follow from them.
    fields: dict[str, Any]
    given: set[str]
    parameters: int
    step: int
    #: FLOPs after each step; the first entry, of no step, is 0.
    flops: list[float]
    #: Records of metrics.jsonl that hold a validation.
    validations: list[dict[str, Any]]
    tokenizer_sha256: str
    #: What the perplexities of validations depend on beside the model. The text is None where it
    #: is no longer there to be hashed.
    validation_text: dict[str, Any]

    def tokens(self, step: int) -> int:
        return step * self.recipe.rows * self.recipe.data.context

    def curve(self) -> list[dict[str, float]]:
        """A point for every validation, the oldest first."""
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
    """Reads everything but the weights.

    Raises:
        FileNotFoundError: it is not a run, or one without metrics or checkpoint.
    """
    if not (run / RECIPE).is_file() and (run / "config.json").is_file():
        raise FileNotFoundError(
            f"{run} is a model without a record of its training (no {RECIPE}): give the run that "
            "it was exported from"
        )
    recipe = recipe_of(run)
    records = read_metrics(run)
    saved = checkpoints.open_checkpoint(run, verify=False)
    config = TrellisConfig.from_dict(json.loads((saved.path / "config.json").read_text()))
    model = weightless(config)
    steps = max([saved.step, *(record["step"] for record in records)])
    contexts = contexts_of(recipe, records, steps)
    of_step = {
        context: recipe.rows * recipe.data.context * training_flops(model, context)
        for context in set(contexts)
    }
    return Training(
        path=run,
        recipe=recipe,
        mixer=_mixer(config),
        fields=_fields(config, lambda name, given: asdict(mixer_config(name, given))),
        given=set(_fields(config, lambda name, given: given)),
        parameters=sum(p.numel() for p in model.parameters()),
        step=saved.step,
        flops=[0.0, *itertools.accumulate(of_step[context] for context in contexts)],
        validations=[record for record in records if "validation_loss" in record],
        tokenizer_sha256=load_tokenizer(run / TOKENIZER).sha256,
        validation_text={
            "text": _validation_text(recipe, saved.content["data"]),
            "context": recipe.data.context,
            "validation_tokens": recipe.log.validation_tokens,
        },
    )


def _mixer(config: TrellisConfig) -> str:
    names = [config.mixer] if isinstance(config.mixer, str) else list(config.mixer)
    return "+".join(names if len(set(names)) > 1 else names[:1])


def _fields(
    config: TrellisConfig, of: Callable[[str, dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Of all mixers in one table, with the mixer before a field's name where there are several."""
    several = len({name for name, _ in config.layer_mixers()}) > 1
    return {
        f"{name}.{field}" if several else field: value
        for name, given in config.layer_mixers()
        for field, value in of(name, given).items()
        if field != "backend"
    }


def _validation_text(recipe: Recipe, corpus: str) -> str | None:
    """Names the text by a hash. corpus: that of the run's own corpus."""
    path = recipe.data.validation_path
    if path is None:
        return f"held out of {corpus}"
    try:
        return open_corpus(path).fingerprint
    except FileNotFoundError:
        return None


def contexts_of(recipe: Recipe, records: Sequence[dict[str, Any]], steps: int) -> list[int]:
    """The context of every step: the schedule's, which depends on the recipe's number of steps.

    A run that was resumed with another number had another schedule before. There a step counts
    with the context of the first record at or after it.
    """
    noted = {record["step"]: record["context"] for record in records if "context" in record}
    at = sorted(noted)
    found = []
    for step in range(1, steps + 1):
        place = bisect.bisect_left(at, step)
        context = context_at(recipe, step - 1)
        if place < len(at) and noted[at[place]] != context_at(recipe, at[place] - 1):
            context = noted[at[place]]
        found.append(context)
    return found


def check_validations(runs: Sequence[Training]) -> None:
    """Raises ValueError unless all have validations, and on the same text in the same way."""
    for run in runs:
        if not run.validations:
            raise ValueError(
                f"{run.path} has no validation in its {FILE}: measure its checkpoint with --data "
                "and --context"
            )
        if len(runs) > 1 and run.validation_text["text"] is None:
            raise ValueError(
                f"{run.path} was validated on {run.recipe.data.validation_path}, which is not "
                "there to be compared: put it back, or measure the runs on one text with --data "
                "and --context"
            )
        for key, value in run.validation_text.items():
            first = runs[0].validation_text[key]
            if value != first:
                raise ValueError(
                    f"{runs[0].path} and {run.path} were not validated alike: {key} is "
                    f"{first!s:.30} and {value!s:.30}. Measure them on one text with "
                    "--data and --context"
                )


def check_tokenizers(runs: Sequence[Training]) -> None:
    """Raises ValueError unless all have the same tokenizer."""
    for run in runs:
        if run.tokenizer_sha256 != runs[0].tokenizer_sha256:
            raise ValueError(
                f"{runs[0].path} and {run.path} have different tokenizers, so that perplexities "
                "per token cannot be compared: add --bits-per-byte"
            )


def variants(runs: Sequence[Training]) -> list[str]:
    """Of every run its mixer, and the fields that are not the same in all runs of this mixer."""
    found = []
    for run in runs:
        alike = [other for other in runs if other.mixer == run.mixer]
        given = set().union(*(other.given for other in alike))
        said = [
            f"{name}={_plain(value)}"
            for name, value in run.fields.items()
            if name in given and any(other.fields[name] != value for other in alike)
        ]
        found.append(f"{run.mixer} ({', '.join(said)})" if said else run.mixer)
    return found


def _plain(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


class PowerLaw(NamedTuple):
    """loss = a * FLOPs^-b"""

    a: float
    b: float


def fit(flops: Sequence[float], losses: Sequence[float]) -> PowerLaw | None:
    """By least squares of the logarithms; None for fewer than three different FLOPs."""
    if len(set(flops)) < 3:
        return None
    x, y = ([math.log(value) for value in values] for values in (flops, losses))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum(
        (a - mean_x) ** 2 for a in x
    )
    return PowerLaw(math.exp(mean_y - slope * mean_x), -slope)
