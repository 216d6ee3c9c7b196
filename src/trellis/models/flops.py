"""Floating-point operations of a model, by one formula for all mixers.

forward(token) = 2 x (entries of all linear maps, the head included) + sum of all mixers' flops
training(token) = 3 x forward: the backward makes two products for each of the forward's.

Every mixer's formula, and how it is checked against torch.utils.flop_counter: docs/flops.md.
"""

from __future__ import annotations

from torch import nn

from ..mixers import Mixer


def forward_flops(model: nn.Module, context: int) -> float:
    """Operations per token of reading `context` tokens, on average; a multiply-add counts as two.

    Embedding look-ups, norms and activations are left out: they do not grow with the width squared.
    """
    mixing = sum(m.flops(context) for m in model.modules() if isinstance(m, Mixer))
    return 2 * linear_entries(model) + mixing


def training_flops(model: nn.Module, context: int) -> float:
    """Operations per token of a training step, without what activation checkpointing repeats."""
    return 3 * forward_flops(model, context)


def linear_entries(module: nn.Module) -> int:
    """Entries of all linear maps."""
    return sum(m.in_features * m.out_features for m in module.modules() if isinstance(m, nn.Linear))
