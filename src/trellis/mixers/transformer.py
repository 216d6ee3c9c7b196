"""Softmax attention as in Transformer++ (Llama): rotary positions, causal, with a key-value cache.

With a window, a token sees itself and the window - 1 tokens before it, and the cache is bounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from .base import Mixer, even_head_size, head_size
from .layers import rotated

#: A mask is built for so many (query, key) pairs at a time.
MASK_ENTRIES = 2**23


@dataclass
class TransformerMixerConfig:
    """heads: number of heads; None takes the model's `num_attention_heads`.

    window: tokens that a token sees, itself included; None sees all before it.
    rope_theta: base of the rotary frequencies.
    """

    heads: int | None = None
    window: int | None = None
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        checks.at_least("heads", self.heads, 1, optional=True)
        checks.at_least("window", self.window, 1, optional=True)
        checks.at_least("rope_theta", self.rope_theta, 1, whole=False)


class AttentionState(NamedTuple):
    """The cache of N sequences, aligned at its end: the newest token is the last column.

    keys, values: [N, H, L, D], keys already rotated. length: [N], tokens read so far; the last
    min(length, L) columns of a sequence are filled.
    """

    keys: Tensor
    values: Tensor
    length: Tensor


class TransformerMixer(Mixer):
    def __init__(self, dim: int, heads: int, config: TransformerMixerConfig):
        super().__init__()
        self.config = config
        self.heads = config.heads or heads
        self.head = head_size(dim, self.heads)
        even_head_size(self.head)
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(
        self, x: Tensor, state: AttentionState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, AttentionState]:
        q, k, v = (self._split(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if cu_seqlens is None:
            if state is None:
                state = self.init_state(x.shape[0])
            y, state = self._attend(q, k, v, state)
        else:
            if state is None:
                state = self.init_state(cu_seqlens.shape[0] - 1)
            y, state = self._attend_packed(q, k, v, state, cu_seqlens)
        return self.o_proj(y.transpose(1, 2).flatten(2)), state

    def init_state(self, batch: int) -> AttentionState:
        weight = self.o_proj.weight
        empty = weight.new_zeros(batch, self.heads, 0, self.head)
        return AttentionState(
            empty, empty, torch.zeros(batch, dtype=torch.long, device=weight.device)
        )

    def state_size(self, tokens: int | None = None) -> float:
        columns = min(math.inf if tokens is None else tokens, self._kept)
        return 2 * self.heads * self.head * columns + 1

    def flops(self, context: int) -> float:
        window = min(self.config.window or context, context)
        seen = window - window * (window - 1) / (2 * context)  # tokens, on average
        return 4 * self.heads * self.head * seen  # scores and weighted values

    @property
    def _kept(self) -> float:
        """Columns that the next token may see."""
        return math.inf if self.config.window is None else self.config.window - 1

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, H, T, D]"""
        return x.unflatten(-1, (self.heads, self.head)).transpose(1, 2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState
    ) -> tuple[Tensor, AttentionState]:
        """q, k, v [N, H, T, D], equally many new tokens for every sequence."""
        place = state.length[:, None] + torch.arange(q.shape[2], device=q.device)
        q, k = rotated(q, k, place[:, None], self.config.rope_theta)
        cached = state.keys.shape[2]
        if cached:
            k = torch.cat([state.keys.to(k.dtype), k], dim=2)
            v = torch.cat([state.values.to(v.dtype), v], dim=2)
        if cached == 0 and self.config.window is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif q.shape[2] == 1 and cached <= self._kept and _all_filled(state.length, cached):
            y = F.scaled_dot_product_attention(q, k, v)  # one token that sees every column
        else:
            y = _masked_attention(q, k, v, state.length.clamp(max=cached), self.config.window)
        length = state.length + q.shape[2]
        first = k.shape[2] - int(min(k.shape[2], self._kept))
        if first > 0:  # copies, so that the cache does not hold on to what it drops
            k, v = k[:, :, first:].clone(), v[:, :, first:].clone()
        return y, AttentionState(k, v, length)

    def _attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState, cu_seqlens: Tensor
    ) -> tuple[Tensor, AttentionState]:
        """One row of sequences, each attended to on its own; the caches are aligned afterwards."""
        bounds = cu_seqlens.tolist()
        outputs, states = [], []
        for n, (begin, end) in enumerate(zip(bounds, bounds[1:])):
            entry = AttentionState(*(part[n : n + 1] for part in state))
            rows = slice(begin, end)
            y, after = self._attend(q[:, :, rows], k[:, :, rows], v[:, :, rows], entry)
            outputs.append(y)
            states.append(after)
        if not states:
            return q, state
        # No column that is empty in all: sequences of a batch may have read in turns.
        longest = int(min(max(int(s.length) for s in states), self._kept))
        keys = [_aligned(s.keys, longest) for s in states]
        values = [_aligned(s.values, longest) for s in states]
        joined = AttentionState(
            torch.cat(keys), torch.cat(values), torch.cat([s.length for s in states])
        )
        return torch.cat(outputs, dim=2), joined


def _all_filled(length: Tensor, columns: int) -> bool:
    """Whether no column is empty; not asked on devices where the answer has to be waited for."""
    return length.device.type == "cpu" and bool((length >= columns).all())


def _aligned(cache: Tensor, columns: int) -> Tensor:
    """The last `columns` columns of a cache, zeros before its first."""
    return F.pad(cache, (0, 0, columns - cache.shape[2], 0))


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, filled: Tensor, window: int | None
) -> Tensor:
    """Attention of the last T of S columns to the columns before them, block by block.

    q [N, H, T, D]; k, v [N, H, S, D]; of the first S - T columns the last `filled` [N] hold tokens.
    """
    tokens, columns = q.shape[2], k.shape[2]
    cached = columns - tokens
    block = max(1, MASK_ENTRIES // max(columns, 1))
    if window is not None:
        block = min(block, max(window, 128))
    outputs = []
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        low = 0 if window is None else max(0, cached + start - window + 1)
        row = torch.arange(cached + start, cached + stop, device=q.device)[:, None]
        column = torch.arange(low, cached + stop, device=q.device)
        seen = column <= row
        if window is not None:
            seen = seen & (column > row - window)
        seen = seen & (column >= cached - filled[:, None, None, None])
        keys, values = k[:, :, low : cached + stop], v[:, :, low : cached + stop]
        outputs.append(
            F.scaled_dot_product_attention(q[:, :, start:stop], keys, values, attn_mask=seen)
        )
    return torch.cat(outputs, dim=2) if outputs else torch.zeros_like(q)
