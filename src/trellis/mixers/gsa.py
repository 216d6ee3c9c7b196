"""Gated slot attention (GSA): attention over a fixed number of slots that forget.

    x -> q, k, v (SiLU); f, the share that each slot keeps -> gated_slots, writing 1 - f
      -> SiLU -> RMSNorm -> * SiLU(gate) -> output projection

Paper: Zhang et al. 2024, "Gated Slot Attention for Efficient Linear-Time Sequence Modeling". The
equations of the memory are in ops/gated_slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..ops import SlotState, gated_slots, silu_product
from ..ops.recurrence import BACKENDS
from .base import Mixer, head_dim_of, heads_of_slots
from .layers import RMSNorm, blank_state, sequences, wide


@dataclass
class GSAMixerConfig:
    """The choices of GSA.

    heads: number of heads. None means 4, the authors' number at every width: the number of
        slots per head does not depend on the width, and slots of wider heads hold more. Where 4
        does not divide the width, None takes the model's `num_attention_heads`.
    slots: memory slots per head.
    decay_temperature: log f = logsigmoid(.) / decay_temperature; slots keep longer the larger it
        is.
    scale: factor of the scores of slots before the softmax; the authors use 1.
    output_gate: multiply the normalised output by SiLU(gate). The authors' layer has no gate; it is
        on by default because the Trellis paper gives all its recurrent baselines norm and gate,
        and because the bare norm makes the layer put out several times what attention does.
    norm_eps: epsilon of the RMSNorm.
    backend: which implementation of the memory runs, such as "auto" or "reference".
    """

    heads: int | None = None
    slots: int = 64
    decay_temperature: float = 8.0
    scale: float = 1.0
    output_gate: bool = True
    norm_eps: float = 1e-6
    backend: str = "auto"

    def __post_init__(self) -> None:
        checks.choice("backend", self.backend, BACKENDS)
        checks.at_least("slots", self.slots, 1)
        checks.at_least("norm_eps", self.norm_eps, 0, whole=False)
        checks.at_least("heads", self.heads, 1, optional=True)
        checks.positive("decay_temperature", self.decay_temperature)
        checks.positive("scale", self.scale)
        checks.flag("output_gate", self.output_gate)


class GSAMixer(Mixer):
    no_weight_decay = ("f_proj.weight",)

    def __init__(self, dim: int, heads: int, config: GSAMixerConfig):
        super().__init__()
        self.config = config
        self.heads = config.heads or heads_of_slots(dim, heads)
        self.head_dim = head_dim_of(dim, self.heads)
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.f_proj = nn.Linear(dim, self.heads * config.slots, bias=False)
        self.g_proj = nn.Linear(dim, dim, bias=False) if config.output_gate else None
        self.out_norm = RMSNorm(dim, config.norm_eps)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(
        self, x: Tensor, state: SlotState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, SlotState]:
        config = self.config
        if state is None:
            state = self.init_state(sequences(x, cu_seqlens))
        q, k, v = (F.silu(self._split(p(x))) for p in (self.q_proj, self.k_proj, self.v_proj))
        log_f = F.logsigmoid(wide(self._split(self.f_proj(x)))) / config.decay_temperature
        y, after = gated_slots(
            q, k, v, -torch.expm1(log_f), log_f,
            scale=config.scale, initial_state=state, output_final_state=True,
            cu_seqlens=cu_seqlens, backend=config.backend,
        )  # fmt: skip
        assert after is not None
        y = self.out_norm(F.silu(y.flatten(2)))
        if self.g_proj is not None:
            y = silu_product(self.g_proj(x), y)
        return self.o_proj(y), after

    def init_state(self, batch: int) -> SlotState:
        blank = blank_state(self.o_proj.weight, batch, self.heads, self.config.slots, self.head_dim)
        return SlotState(blank, blank.clone())

    def state_size(self, tokens: int | None = None) -> float:
        return 2 * self.heads * self.config.slots * self.head_dim

    def flops(self, context: int) -> float:
        # Each of the two passes scales its memory, adds an outer product to it and multiplies it
        # by a vector.
        return 2 * self.heads * self.config.slots * self.head_dim * (1 + 2 + 2)

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, H * size] -> [B, T, H, size]"""
        return x.unflatten(-1, (self.heads, -1))
