"""AdamW, and which weights decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..mixers.base import names_without_weight_decay
from .recipe import TrainSection


def decayed_names(model: nn.Module) -> set[str]:
    """The weights of linear maps; all else (norms, biases, gates, embeddings, ...) does not decay.

    A tied head counts as the embedding that it is.
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
