"""What training a run took, and how its perplexity fell meanwhile.

FLOPs of a run: the sum over its steps of tokens x training_flops(model, context of the step), the
formulas of models/flops.py. Steps that were skipped count too: they were computed.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..data.tokenizer import load_tokenizer
from ..files import sha256_of
from ..models.config import TrellisConfig
from ..models.flops import training_flops
from ..models.modeling import TrellisForCausalLM
from ..training import checkpoint as checkpoints
from ..training.metrics import FILE, read_metrics
from ..training.recipe import Recipe
from ..training.run import RECIPE, TOKENIZER, recipe_of
from ..training.schedule import context_at


@dataclass
class Training:
    """What a run's folder says of its training, up to its newest checkpoint."""

    path: Path
    recipe: Recipe
    mixer: str
    parameters: int
    step: int
    #: FLOPs after each step; the first entry, of no step, is 0.
    flops: list[float]
    #: Records of metrics.jsonl that hold a validation.
    validations: list[dict[str, Any]]
    tokenizer_sha256: str
    #: What the perplexities of validations depend on beside the model.
    validation_text: dict[str, Any]
    metrics_sha256: str

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
            "perplexity": math.exp(min(loss, 700.0)),
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
    with torch.device("meta"):
        model = TrellisForCausalLM(config)
    steps = max([saved.step, *(record["step"] for record in records)])
    contexts = contexts_of(recipe, records, steps)
    of_step = {
        context: recipe.rows * recipe.data.context * training_flops(model, context)
        for context in set(contexts)
    }
    return Training(
        path=run,
        recipe=recipe,
        mixer="+".join(dict.fromkeys(name for name, _ in config.layer_mixers())),
        parameters=sum(p.numel() for p in model.parameters()),
        step=saved.step,
        flops=[0.0, *itertools.accumulate(of_step[context] for context in contexts)],
        validations=[record for record in records if "validation_loss" in record],
        tokenizer_sha256=load_tokenizer(run / TOKENIZER).sha256,
        validation_text={
            "corpus": saved.content["data"],
            "validation_path": recipe.data.validation_path,
            "context": recipe.data.context,
            "validation_tokens": recipe.log.validation_tokens,
        },
        metrics_sha256=sha256_of(run / FILE),
    )


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
        for key, value in run.validation_text.items():
            first = runs[0].validation_text[key]
            if value != first:
                raise ValueError(
                    f"{runs[0].path} and {run.path} were not validated alike: {key} is {first} and "
                    f"{value}. Measure them on one text with --data and --context"
                )


def check_tokenizers(runs: Sequence[Training]) -> None:
    """Raises ValueError unless all have the same tokenizer."""
    for run in runs:
        if run.tokenizer_sha256 != runs[0].tokenizer_sha256:
            raise ValueError(
                f"{runs[0].path} and {run.path} have different tokenizers, so that perplexities "
                "per token cannot be compared: add --bits-per-byte"
            )


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
