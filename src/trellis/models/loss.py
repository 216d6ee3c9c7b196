"""Cross-entropy of next tokens without all logits in memory at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED = -100


def next_token_loss(
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    chunk: int,
    count: Tensor | float | None = None,
) -> Tensor:
    """Mean cross-entropy of predicting targets[:, t] from hidden[:, t].

    hidden [B, T, dim], targets [B, T] with -100 where nothing is to be predicted. Logits are made
    for `chunk` tokens at a time and made again in the backward. `count` replaces the number of
    predicted tokens as the divisor. Without any token to predict the loss is NaN, as in torch.
    """
    flat = hidden.flatten(0, 1)
    targets = targets.flatten()
    predicted = targets != IGNORED
    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, flat.shape[0], chunk):
        part = flat[start : start + chunk], targets[start : start + chunk]
        if torch.is_grad_enabled() and flat.shape[0] > chunk:
            total = total + checkpoint(_summed_loss, *part, head, use_reentrant=False)
        else:
            total = total + _summed_loss(*part, head)
    return total / (predicted.sum() if count is None else count)


def _summed_loss(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
    return F.cross_entropy(head(hidden).float(), targets, ignore_index=IGNORED, reduction="sum")
