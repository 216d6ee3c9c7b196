"""AdamW, and which weights decay."""

from __future__ import annotations

import torch
from torch import nn

from ..mixers.base import names_without_weight_decay
from .recipe import TrainSection


def decayed_names(model: nn.Module) -> set[str]:
    """Weights of linear maps. Norms, biases, gates, convolutions, memories, embeddings do not decay.

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
    groups = [
        {"params": [p for n, p in model.named_parameters() if n in decayed]},
        {
            "params": [p for n, p in model.named_parameters() if n not in decayed],
            "weight_decay": 0.0,
        },
    ]
    return torch.optim.AdamW(
        groups,
        lr=train.learning_rate,
        betas=(train.betas[0], train.betas[1]),
        eps=train.epsilon,
        weight_decay=train.weight_decay,
        fused=fused,
    )
