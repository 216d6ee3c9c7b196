"""How a step changes weights: its learning rate and context, AdamW, and steps that go wrong."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..mixers.base import names_without_weight_decay
from .recipe import Recipe, TrainSection


def learning_rate(recipe: Recipe, step: int) -> float:
    """The rate of a step, counted from 0: a linear warm-up, then a cosine to the minimum."""
    train, steps = recipe.train, recipe.steps
    warmup = round(train.warmup * steps)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    low = min(train.min_learning_rate, train.learning_rate)
    return low + (train.learning_rate - low) * cosine


def context_at(recipe: Recipe, step: int) -> int:
    """Tokens per sequence in a step: data.context, or fewer while train.context_warmup lasts."""
    for share, tokens in recipe.train.context_warmup:
        if step < share * recipe.steps:
            return min(int(tokens), recipe.data.context)
    return recipe.data.context


def decayed_names(model: nn.Module) -> set[str]:
    """The names of the weights that weight decay applies to: those of linear maps.

    Norms, biases, gates and embeddings do not decay; nor does a head that is tied to the embedding.
    """
    exempt = names_without_weight_decay(model)
    shared = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linear = {
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) not in shared
    }
    return linear - exempt


def build_optimizer(model: nn.Module, train: TrainSection, fused: bool) -> torch.optim.AdamW:
    """AdamW by the recipe's [train] section."""
    decayed = decayed_names(model)
    named = dict(model.named_parameters())
    kept = [p for name, p in named.items() if name not in decayed]
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named.items() if name in decayed]},
        {"params": kept, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=train.learning_rate,
        betas=(train.betas[0], train.betas[1]),
        eps=train.epsilon,
        weight_decay=train.weight_decay,
        fused=fused,
    )


@contextlib.contextmanager
def not_finite_outputs(model: nn.Module) -> Iterator[list[str]]:
    """A list that gets the names of modules as they give an output that is not finite."""
    found: list[str] = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and not _finite(first):
            found.append(name or type(module).__name__)

    handles = [
        module.register_forward_hook(functools.partial(look, name))
        for name, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def diagnose(model: nn.Module, outputs: list[str], union: Callable[[list[str]], list[str]]) -> str:
    """One sentence that says which weights, outputs or gradients are not finite.

    outputs: what `not_finite_outputs` listed. union: joins the names that the processes found, each
    of which may hold a part of the weights.
    """
    weights = union([name for name, p in model.named_parameters() if not _finite(p.detach())])
    firsts = union(outputs[:1])
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    grads = union([name for name, grad in named if not _finite(grad)])
    if weights:
        return f"weights that are not finite: {_some(weights)}"
    if firsts:
        return f"the first output that is not finite is that of {firsts[0]}"
    if grads:
        # The backward runs from the last layer to the first: the last named is where it began.
        return f"gradients that are not finite: {_some(grads)}; the last of them is {grads[-1]}"
    return "all weights, outputs and gradients are finite one by one, but not their sum"


def _finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bool(torch.isfinite(local).all()) if local.is_floating_point() else True


def _some(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
