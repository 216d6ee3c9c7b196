"""The blocks of the language model: pre-norm mixer, pre-norm SwiGLU.

token ids -> embedding -> [ + mixer(norm) -> + mlp(norm) ] x layers -> norm -> logits
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..mixers import build_mixer
from ..mixers.base import State
from ..mixers.layers import RMSNorm
from ..ops import silu_product
from .carry import Carried


class SwiGLU(nn.Module):
    def __init__(self, dim: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, width, bias=False)
        self.up_proj = nn.Linear(dim, width, bias=False)
        self.down_proj = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_product(self.gate_proj(x), self.up_proj(x)))


class Block(GradientCheckpointingLayer):
    def __init__(
        self, dim: int, heads: int, width: int, eps: float, mixer: str, fields: dict[str, Any]
    ):
        super().__init__()
        self.mixer_norm = RMSNorm(dim, eps)
        self.mixer = build_mixer(mixer, dim, heads, **fields)
        self.mlp_norm = RMSNorm(dim, eps)
        self.mlp = SwiGLU(dim, width)

    def forward(
        self, x: Tensor, state: State | Carried | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, State]:
        if isinstance(state, Carried):
            state = state.fill(self.mixer.init_state(state.sequences))
        mixed, state = self.mixer(self.mixer_norm(x), state, cu_seqlens)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state
