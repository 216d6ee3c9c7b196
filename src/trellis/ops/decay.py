"""How a memory decays inside a chunk, with one factor per token and head.

w(t, s) is the product of the decays over s+1 .. t. It is built by products: differences of
cumulated logs lose digits at strong decay, and ratios of exponentials overflow. All tensors are
[G, c, ...] with G = chunks x heads and c tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: Tokens whose weights are built row by row; longer chunks are made of such blocks.
BLOCK = 16


class Decay:
    """The decay weights of a chunk, from log_decay [G, c]."""

    def __init__(self, log_decay: Tensor):
        decays = flushed(log_decay.exp())
        #: The decay of each token alone; [G, c, 1]
        self.own = decays[..., None]
        #: w(t, s) for s <= t, else 0; [G, c, c]
        self.within = flushed(_products(decays))
        #: exp(L_t), the decay from the chunk's start up to and with token t; [G, c, 1]
        self.start = flushed(decays.cumprod(1))[..., None]

    @property
    def end(self) -> Tensor:
        """w(C, s), from token s to the chunk's end; [G, c, 1]"""
        return self.within[:, -1, :, None]

    @property
    def whole(self) -> Tensor:
        """exp(L_C); [G, 1, 1]"""
        return self.start[:, -1:]

    def within_strictly(self) -> Tensor:
        """w(t, s) for s < t, else 0; [G, c, c]"""
        return self.within.tril(-1)

    def within_before(self) -> Tensor:
        """w(t - 1, s) for s < t, else 0; [G, c, c]"""
        shifted = torch.zeros_like(self.within)
        shifted[:, 1:] = self.within[:, :-1]
        return shifted

    def start_before(self) -> Tensor:
        """exp(L_{t-1}); [G, c, 1]"""
        return torch.cat([torch.ones_like(self.start[:, :1]), self.start[:, :-1]], dim=1)


def flushed(weights: Tensor) -> Tensor:
    """0 in place of weights below 5e-26 (in fp32), which lead out of the range of normal numbers.

    Processors are many times slower with numbers below that range. A weight that is left stays
    normal when multiplied by anything above 2e-13. What is dropped is far below the rounding error
    of a memory, unless its entries differ by 20 powers of ten.
    """
    return F.hardshrink(weights, torch.finfo(weights.dtype).tiny ** (2 / 3))


def _products(decays: Tensor) -> Tensor:
    """w(t, s) = decay_t w(t - 1, s), all rows of a block at once where s lies before the block."""
    rows, c = decays.shape
    size = BLOCK if c % BLOCK == 0 else c
    count = c // size
    within = decays.new_zeros(rows, c, c)
    within.diagonal(dim1=1, dim2=2).fill_(1)
    blocks = within.view(rows, count, size, count, size).diagonal(dim1=1, dim2=3)
    blocks = blocks.permute(0, 3, 1, 2)  # those on the diagonal, [rows, count, size, size]
    decays = decays.view(rows, count, size)
    for t in range(1, size):
        torch.mul(blocks[:, :, t - 1, :t], decays[:, :, t, None], out=blocks[:, :, t, :t])
    start = decays.cumprod(2)[..., None]
    for i in range(1, count):
        first, stop = i * size, (i + 1) * size
        before = within[:, first - 1, None, :first]
        torch.mul(before, start[:, i], out=within[:, first:stop, :first])
    return within


def log_decay_gradient(pairs: Tensor, starts: Tensor) -> Tensor:
    """d log_decay_i = sum over s < i <= t of pairs[t, s] + sum over t >= i of starts[t].

    Summed as it stands: differences of row and column sums would cancel.
    """
    # [t, i - 1] of the cumulated sums holds all s < i; rows t >= i are strictly below the diagonal.
    before = pairs.cumsum(2).tril_(-1).sum(1)
    gradient = starts.flip(1).cumsum(1).flip(1)
    gradient[:, 1:] += before[:, :-1]
    return gradient


def lower(weights: Tensor, products: Tensor) -> Tensor:
    """weights * products below and on the diagonal; exact zeros above, also for inf and NaN."""
    return (weights * products).tril_()
