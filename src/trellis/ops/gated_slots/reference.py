"""The definition of the gated slot memory, token by token."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_slots_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor | None,
    keys: Tensor,
    values: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [N, T, H, K], v [N, T, H, V], write, log_decay [N, T, H, M] -> y, keys, values."""
    outputs = []
    for t in range(q.shape[1]):
        a = write[:, t, :, :, None]
        if log_decay is not None:
            decay = log_decay[:, t, :, :, None].exp()
            keys, values = decay * keys, decay * values
        keys = keys + a * k[:, t, :, None]
        values = values + a * v[:, t, :, None]
        r = (scale * (keys @ q[:, t, :, :, None])).softmax(dim=2)
        outputs.append((values.mT @ r).squeeze(3))
    y = torch.stack(outputs, dim=1) if outputs else v.new_empty(v.shape)
    return y, keys, values
