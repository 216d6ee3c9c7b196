"""The definition, token after token. Slow, any dtype; autograd does the rest."""

from __future__ import annotations

import torch
from torch import Tensor


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Equal-length sequences: q, k [N, T, H, K]; v [N, T, H, V]; beta, log_decay [N, T, H];
    state [N, H, K, V]. Returns y [N, T, H, V] and the state after the last token.
    """
    outputs = []
    for t in range(q.shape[1]):
        if log_decay is not None:
            state = log_decay[:, t, :, None, None].exp() * state
        error = v[:, t] - _read(state, k[:, t])
        write = beta[:, t, :, None] * k[:, t]
        state = state + write[..., :, None] * error[..., None, :]
        outputs.append(scale * _read(state, q[:, t]))
    return torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v), state


def _read(state: Tensor, key: Tensor) -> Tensor:
    """S^T k: [N, H, K, V], [N, H, K] -> [N, H, V]"""
    return (key[..., None, :] @ state).squeeze(-2)
