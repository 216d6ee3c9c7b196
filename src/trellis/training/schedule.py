"""What depends on the step alone."""

from __future__ import annotations

import math

from .recipe import Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """Of the update number `step`, from 0: a linear warm-up, then a cosine to the minimum."""
    train, steps = recipe.train, recipe.steps
    warmup = round(train.warmup * steps)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    low = min(train.min_learning_rate, train.learning_rate)
    return low + (train.learning_rate - low) * cosine


def context_at(recipe: Recipe, step: int) -> int:
    """Tokens of a sequence: fewer than data.context while the context warms up."""
    for share, tokens in recipe.train.context_warmup:
        if step < share * recipe.steps:
            return min(int(tokens), recipe.data.context)
    return recipe.data.context
