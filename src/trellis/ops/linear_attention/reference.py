"""The definition of linear attention, token after token."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """R heads share the queries and keys of a group.

    q, k: [N, T, G, K]. v: [N, T, G, R, V]. log_decay: [N, T, G, R], or None.
    memory: [N, G, R, K, V].
    Returns y [N, T, G, R * V] and the memory after the last token.
    """
    outputs = []
    for t in range(q.shape[1]):
        if log_decay is not None:
            memory = log_decay[:, t, :, :, None, None].exp() * memory
        memory = torch.addcmul(memory, k[:, t, :, None, :, None], v[:, t, :, :, None])
        outputs.append((q[:, t, :, None, None] @ memory).flatten(2))
    y = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v).flatten(3)
    return y, memory
