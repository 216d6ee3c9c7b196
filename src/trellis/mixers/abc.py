"""Attention with bounded-memory control (ABC): tokens are averaged into slots and read from them.

    x -> q, k (rotary positions), v ; slot logits -> write weights -> gated_slots
      -> RMSNorm per head -> * SiLU(gate) -> output projection

Paper: Peng et al. 2022, "ABC: Attention with Bounded-memory Control"; this is its learned control.
The equations of the memory are in ops/gated_slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import checks
from ..ops import SlotState, gated_slots, running_softmax, silu_product
from ..ops.gated_slots import LOGIT_BOUND
from ..ops.recurrence import BACKENDS
from .base import Mixer, check_even_head_dim, expanded_dim, head_dim_of, heads_of_slots
from .layers import RMSNorm, blank_state, places, plain, rotated, sequences, wide

WRITES = ("time", "slots")


@dataclass
class ABCMixerConfig:
    """The choices of ABC.

    heads: number of heads. None means 4 at every width, as in flash-linear-attention, whose authors
        brought the layer to language models: a slot of a wider head holds more. Where 4 does not
        divide the width, None takes the model's `num_attention_heads`.
    expand_k: size of a head's keys as a multiple of the size of its values, width / heads; 0.5 as
        there. Keys only find slots, values are what is read from them.
    slots: memory slots per head.
    write: what the softmax of the slot logits runs over. "time", as the authors have it: over the
        tokens read so far, so that a slot is a weighted mean of all of them. "slots": over the
        slots, so that every token writes a total of 1 and nothing is forgotten.
    rope_theta: base of the rotary frequencies; None leaves positions out. A mean does not know
        the order of its tokens, so only rotated keys tell the layer about it.
    norm_eps: epsilon of the RMSNorm.
    backend: which implementation of the memory runs, such as "auto" or "reference".
    """

    heads: int | None = None
    expand_k: float = 0.5
    slots: int = 64
    write: str = "time"
    rope_theta: float | None = 10000.0
    norm_eps: float = 1e-6
    backend: str = "auto"

    def __post_init__(self) -> None:
        checks.choice("write", self.write, WRITES)
        checks.choice("backend", self.backend, BACKENDS)
        checks.at_least("slots", self.slots, 1)
        checks.at_least("norm_eps", self.norm_eps, 0, whole=False)
        checks.at_least("heads", self.heads, 1, optional=True)
        checks.at_least("rope_theta", self.rope_theta, 1, whole=False, optional=True)


class ABCState(NamedTuple):
    """The memories of N sequences, and where their write weights and positions stand.

    total: [N, H, M], the sums of exp(logits) over the tokens read; None with write="slots".
    length: [N], the number of tokens read; None without positions.
    """

    memory: SlotState
    total: Tensor | None = None
    length: Tensor | None = None


class ABCMixer(Mixer):
    def __init__(self, dim: int, heads: int, config: ABCMixerConfig):
        super().__init__()
        self.config = config
        self.heads = config.heads or heads_of_slots(dim, heads)
        self.head_dim = head_dim_of(dim, self.heads)
        self.key_dim = expanded_dim("expand_k", config.expand_k, self.head_dim, "head size")
        if config.rope_theta is not None:
            check_even_head_dim(self.key_dim)
        self.q_proj = nn.Linear(dim, self.heads * self.key_dim, bias=False)
        self.k_proj = nn.Linear(dim, self.heads * self.key_dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.g_proj = nn.Linear(dim, dim, bias=False)
        self.s_proj = nn.Linear(dim, self.heads * config.slots, bias=False)
        self.out_norm = RMSNorm(self.head_dim, config.norm_eps)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(
        self, x: Tensor, state: ABCState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, ABCState]:
        if state is None:
            state = self.init_state(sequences(x, cu_seqlens))
        q, k, v = (self._split(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        length = state.length
        if length is not None:
            assert self.config.rope_theta is not None
            place = places(length, x.shape[1], cu_seqlens)
            length = length + (x.shape[1] if cu_seqlens is None else cu_seqlens.diff())
            q, k = rotated(q, k, place[..., None], self.config.rope_theta)

        logits = wide(self._split(self.s_proj(x))).clamp(-LOGIT_BOUND, LOGIT_BOUND)
        total, log_decay = state.total, None
        if total is None:
            write = logits.softmax(-1)
        else:
            write, log_decay, total = running_softmax(logits, total, cu_seqlens=cu_seqlens)
        y, memory = gated_slots(
            q, k, v, write, log_decay,
            initial_state=state.memory, output_final_state=True,
            cu_seqlens=cu_seqlens, backend=self.config.backend,
        )  # fmt: skip
        assert memory is not None
        y = silu_product(self._split(self.g_proj(x)), self.out_norm(y))
        return self.o_proj(y.flatten(2)), ABCState(memory, total, length)

    def init_state(self, batch: int) -> ABCState:
        weight, slots = plain(self.o_proj.weight), (batch, self.heads, self.config.slots)
        memory = SlotState(
            blank_state(weight, *slots, self.key_dim), blank_state(weight, *slots, self.head_dim)
        )
        total = blank_state(weight, *slots) if self.config.write == "time" else None
        length = None
        if self.config.rope_theta is not None:
            length = torch.zeros(batch, dtype=torch.long, device=weight.device)
        return ABCState(memory, total, length)

    def state_size(self, tokens: int | None = None) -> float:
        in_time, placed = self.config.write == "time", self.config.rope_theta is not None
        row = self.key_dim + self.head_dim + in_time
        return self.heads * self.config.slots * row + placed

    def flops(self, context: int) -> float:
        # Each of the two passes adds an outer product to its memory and multiplies the memory by a
        # vector; with write="time" it also scales the memory.
        each = 2 + 2 + (self.config.write == "time")
        return self.heads * self.config.slots * (self.key_dim + self.head_dim) * each

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, H * size] -> [B, T, H, size]"""
        return x.unflatten(-1, (self.heads, -1))
