"""How a memory decays inside a chunk, with one factor per token and head.

w(t, s) is the product of beta over s+1 .. t, built by products: differences of cumulated logs lose
digits at strong decay and ratios of exponentials overflow. All tensors are [G, c, ...] with
G = sequences x heads and c tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Decay:
    """The decay weights of a chunk, from log_beta [G, c]."""

    def __init__(self, log_beta: Tensor):
        beta = log_beta.exp()
        c = beta.shape[1]
        ones = torch.ones(c, c, dtype=torch.bool, device=beta.device)
        steps = torch.where(ones.tril(-1), beta[:, :, None], torch.ones_like(beta[:, :1, None]))
        #: w(t, s) for s <= t, else 0; [G, c, c]
        self.within = steps.cumprod(1).tril()
        #: exp(L_t), the decay from the chunk's start up to and with token t; [G, c, 1]
        self.start = beta.cumprod(1)[..., None]

    @property
    def end(self) -> Tensor:
        """w(C, s), from token s to the chunk's end; [G, c, 1]"""
        return self.within[:, -1, :, None]

    @property
    def whole(self) -> Tensor:
        """exp(L_C); [G, 1, 1]"""
        return self.start[:, -1:]

    def within_before(self) -> Tensor:
        """w(t - 1, s) for s < t, else 0; [G, c, c]"""
        shifted = torch.zeros_like(self.within)
        shifted[:, 1:] = self.within[:, :-1]
        return shifted

    def start_before(self) -> Tensor:
        """exp(L_{t-1}); [G, c, 1]"""
        return torch.cat([torch.ones_like(self.start[:, :1]), self.start[:, :-1]], dim=1)


def log_decay_gradient(pairs: Tensor, starts: Tensor) -> Tensor:
    """d log_beta_i = sum over s < i <= t of pairs[t, s] + sum over t >= i of starts[t].

    Summed as it stands: differences of row and column sums would cancel.
    """
    before = torch.zeros_like(pairs)
    before[:, :, 1:] = pairs.cumsum(2)[:, :, :-1]
    return before.tril().sum(1) + starts.flip(1).cumsum(1).flip(1)


def lower(weights: Tensor, products: Tensor) -> Tensor:
    """weights * products below and on the diagonal; exact zeros above, also for inf and NaN."""
    return (weights * products).tril()
