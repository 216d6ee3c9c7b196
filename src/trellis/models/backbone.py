"""The blocks of the language model, and the packing that keeps padding away from them.

token ids -> embedding -> [ + mixer(norm) -> + mlp(norm) ] x layers -> norm -> logits
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..mixers import build_mixer
from ..mixers.base import State
from ..mixers.layers import RMSNorm
from ..ops import silu_product
from .relay import RelayedStates


class SwiGLU(nn.Module):
    """The MLP of a block: down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, width, bias=False)
        self.up_proj = nn.Linear(dim, width, bias=False)
        self.down_proj = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_product(self.gate_proj(x), self.up_proj(x)))


class Block(GradientCheckpointingLayer):
    """A mixer and an MLP, each behind a norm and added to its input."""

    def __init__(
        self, dim: int, heads: int, width: int, eps: float, mixer: str, fields: dict[str, Any]
    ):
        super().__init__()
        self.mixer_norm = RMSNorm(dim, eps)
        self.mixer = build_mixer(mixer, dim, heads, **fields)
        self.mlp_norm = RMSNorm(dim, eps)
        self.mlp = SwiGLU(dim, width)

    def forward(
        self,
        x: Tensor,
        state: State | RelayedStates | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        if isinstance(state, RelayedStates):
            state = state.fill(self.mixer.init_state(state.sequences))
        mixed, state = self.mixer(self.mixer_norm(x), state, cu_seqlens)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state


class Packing:
    """The places of the real tokens in a padded batch. mask [B, T], non-zero at real tokens.

    Mixers never see padding: the real tokens are packed into one row, and what comes out is put
    back to their places.
    """

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
