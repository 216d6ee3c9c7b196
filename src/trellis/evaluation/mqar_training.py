"""Trains a model on multi-query associative recall, at each of some learning rates."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..models.config import TrellisConfig
from ..models.loss import IGNORED
from ..models.modeling import TrellisForCausalLM
from ..training.optimization import build_optimizer, learning_rate
from ..training.recipe import Recipe, TrainSection
from .mqar import Examples, accuracy, examples, query_logits
from .mqar_preset import Group, Preset, Source

#: A batch: where its examples come from, and its number there.
Entry = tuple[Source, int]
#: Told about every look at the validation examples.
Say = Callable[[str], None]


class Trained(NamedTuple):
    """The best model, None if all diverged; and what every learning rate came to."""

    model: TrellisForCausalLM | None
    attempts: list[dict[str, Any]]
    best: dict[str, Any] | None


def train(
    config: TrellisConfig,
    preset: Preset,
    group: Group,
    *,
    seed: int = 0,
    device: str = "cpu",
    say: Say = lambda line: None,
) -> Trained:
    """A model of this configuration, trained at one rate after the other until one is enough.

    With preset.every_rate, at all of them. The best on validation is kept.
    """
    held_out = [
        examples(
            setting, preset.vocab_size, preset.validation_examples, split="validation",
            seed=seed, random_non_queries=preset.random_non_queries,
        ).to(device)
        for setting in preset.validated(group)
    ]  # fmt: skip
    found = Trained(None, [], None)
    for rate in preset.learning_rates:
        model, attempt = _attempt(config, preset, group, rate, held_out, seed, device, say)
        attempts = [*found.attempts, attempt]
        if _is_better(attempt, found.best):
            found = Trained(model, attempts, attempt)
        else:
            found = found._replace(attempts=attempts)
        enough = found.best is not None and found.best["accuracy"] > preset.stop_at
        if enough and not preset.every_rate:
            break
    return found


def _is_better(attempt: dict[str, Any], best: dict[str, Any] | None) -> bool:
    """One that diverged has no accuracy, and is not."""
    if attempt["diverged"]:
        return False
    return best is None or attempt["accuracy"] > best["accuracy"]


def _attempt(
    config: TrellisConfig,
    preset: Preset,
    group: Group,
    rate: float,
    held_out: list[Examples],
    seed: int,
    device: str,
    say: Say,
) -> tuple[TrellisForCausalLM, dict[str, Any]]:
    """One learning rate: the model, and its learning curve."""
    start = time.monotonic()
    with torch.random.fork_rng():  # the same weights at every rate
        torch.manual_seed(seed)
        model = TrellisForCausalLM(config).to(device).train()
    steps = preset.steps_of(group)
    check_every = preset.check_every or preset.epoch_of(group)
    section = TrainSection(
        steps=steps, learning_rate=rate, min_learning_rate=0.0, warmup=preset.warmup,
        weight_decay=preset.weight_decay, betas=list(preset.betas), seed=seed,
    )  # fmt: skip
    recipe = Recipe(train=section)
    optimizer = build_optimizer(model, section, fused=False)
    curve: list[dict[str, float]] = []
    losses: list[float] = []
    diverged = False
    for step, data in zip(range(steps), batches(preset, group, seed)):
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate(recipe, step)
        loss = _update(model, optimizer, data.to(device), preset.clip)
        if not math.isfinite(loss):
            diverged = True
            say(f"rate {rate:.2g}, step {step + 1}/{steps}: the loss is {loss}, given up")
            break
        losses.append(loss)
        if (step + 1) % check_every == 0 or step + 1 == steps:
            right = _mean_accuracy(model, held_out)
            mean = sum(losses) / len(losses)
            losses.clear()
            curve.append({"step": step + 1, "loss": mean, "accuracy": right})
            say(f"rate {rate:.2g}, step {step + 1}/{steps}: loss {mean:.3f}, accuracy {right:.1%}")
            if right > preset.stop_at:
                break
    return model.eval(), {
        "learning_rate": rate,
        "diverged": diverged,
        "accuracy": None if diverged else curve[-1]["accuracy"],
        "steps": step + 1,
        "seconds": round(time.monotonic() - start, 2),
        "curve": curve,
    }


def _update(
    model: TrellisForCausalLM,
    optimizer: torch.optim.Optimizer,
    data: Examples,
    clip: float | None,
) -> float:
    """One step; the loss before it, over the queries of the batch."""
    labels = data.labels[data.labels != IGNORED]
    loss = F.cross_entropy(query_logits(model, *data), labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.item()


def batches(preset: Preset, group: Group, seed: int) -> Iterator[Examples]:
    """Every training example once in an epoch, one setting in a batch.

    With preset.shuffle in a new order each time, else source after source.
    """
    entries = [
        (source, number) for source in group.train for number in range(preset.batches(source))
    ]
    easy, epoch = preset.easy_steps(group), 0
    while True:
        ordered = entries
        if preset.shuffle:
            order = np.random.default_rng([seed, epoch]).permutation(len(entries))
            ordered = [entries[place] for place in order]
        for source, number in _easy_first(ordered, easy):
            rows = preset.rows(source.setting)
            first = number * rows
            yield examples(
                source.setting, preset.vocab_size, min(rows, source.examples - first),
                split="train", seed=seed, first=first,
                random_non_queries=preset.random_non_queries,
            )  # fmt: skip
        easy, epoch = 0, epoch + 1


def _easy_first(entries: list[Entry], count: int) -> list[Entry]:
    """So many entries of the shortest sequences moved to the front."""
    shortest = min(source.setting.length for source, _ in entries)
    front = [entry for entry in entries if entry[0].setting.length == shortest][:count]
    chosen = set(front)
    return [*front, *(entry for entry in entries if entry not in chosen)]


def _mean_accuracy(model: TrellisForCausalLM, held_out: list[Examples]) -> float:
    model.eval()
    found = [accuracy(model, data) for data in held_out]
    model.train()
    return sum(found) / len(found)
