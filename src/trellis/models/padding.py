"""A padded batch as a pack: mixers never see padding."""

from __future__ import annotations

import torch
from torch import Tensor


class Packing:
    """Where the real tokens of a padded batch are. mask [B, T], non-zero at real tokens."""

    def __init__(self, mask: Tensor):
        real = mask != 0
        self.shape = mask.shape
        self.index = real.flatten().nonzero().squeeze(1)
        lengths = real.sum(1)
        self.cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [1, tokens, ...]"""
        return x.flatten(0, 1).index_select(0, self.index)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """[1, tokens, ...] -> [B, T, ...], zeros at padding."""
        batch, tokens = self.shape
        flat = x.new_zeros(batch * tokens, *x.shape[2:])
        return flat.index_copy(0, self.index, x[0]).view(batch, tokens, *x.shape[2:])


def packing_of(mask: Tensor | None) -> Packing | None:
    """The packing of a batch with this mask; None where nothing is padded."""
    return None if mask is None or bool((mask != 0).all()) else Packing(mask)
