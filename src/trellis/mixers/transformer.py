"""Softmax attention as in Transformer++ (Llama): rotary positions, causal, with a key-value cache.

With a window, a token sees itself and the window - 1 tokens before it, and the cache is bounded.
The attention of pretrained models of the Llama family is this mixer with other fields: grouped
queries, biases, norms on queries and keys, heads of any size (models/pretrained.py sets them).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from .base import Mixer, check_even_head_dim, head_dim_of
from .layers import RMSNorm, places, plain, rotated

#: Devices that have torch's attention for sequences of different lengths.
VARLEN_ON = ("cuda",)
#: Attention masks are built in blocks of at most this many (query, key) pairs.
MASK_ENTRIES = 2**23
#: The numbers of Llama 3's rotary scaling, named as in configurations of transformers.
SCALING = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)  # fmt: skip


@dataclass
class TransformerMixerConfig:
    """The choices of softmax attention.

    heads: number of query heads; None takes the model's `num_attention_heads`.
    kv_heads: number of heads of keys and values, a divisor of `heads`: with 8 query heads and 4
        kv_heads, two successive query heads read the same keys and values. None means `heads`.
    head_dim: size of a head; None means the model's width divided by `heads`.
    window: how many tokens a token sees, itself included; None means no limit.
    rope_theta: base of the rotary frequencies.
    rope_scaling: Llama 3's change of the frequencies for longer contexts, as its four numbers
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}.
    qkv_bias: whether the maps of queries, keys and values have a bias, as in Qwen2.
    out_bias: whether the output map has a bias.
    qk_norm: an RMS norm over each head of queries and of keys before the rotation, as in Qwen3.
    norm_eps: epsilon of these norms.
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "window"):
            checks.at_least(name, getattr(self, name), 1, optional=True)
        checks.at_least("rope_theta", self.rope_theta, 1, whole=False)
        checks.at_least("norm_eps", self.norm_eps, 0, whole=False)
        for name in ("qkv_bias", "out_bias", "qk_norm"):
            checks.flag(name, getattr(self, name))
        if self.rope_scaling is not None:
            if not isinstance(self.rope_scaling, dict) or {*self.rope_scaling} != {*SCALING}:
                raise ValueError(
                    f"rope_scaling must have exactly the keys {', '.join(SCALING)}; got "
                    f"{self.rope_scaling!r}"
                )
            for name in SCALING:
                checks.positive(f"rope_scaling.{name}", self.rope_scaling[name])


class AttentionState(NamedTuple):
    """The cache of N sequences. The newest token of each sequence is in the last column.

    keys, values: [N, kv_heads, L, D], the keys already rotated. length: [N], the number of tokens
    read; of a sequence the last min(length, L) columns are filled.
    """

    keys: Tensor
    values: Tensor
    length: Tensor


class TransformerMixer(Mixer):
    def __init__(self, dim: int, heads: int, config: TransformerMixerConfig):
        super().__init__()
        self.config = config
        self.heads = config.heads or heads
        self.kv_heads = config.kv_heads or self.heads
        self.head_dim = config.head_dim or head_dim_of(dim, self.heads)
        check_even_head_dim(self.head_dim)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, {self.heads}; got {self.kv_heads}")
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(dim, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(dim, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(dim, keys, bias=config.qkv_bias)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.o_proj = nn.Linear(queries, dim, bias=config.out_bias)

    def forward(
        self, x: Tensor, state: AttentionState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, AttentionState]:
        q, k, v = (self._split(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
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
        weight = plain(self.o_proj.weight)
        device, shape = weight.device, (batch, self.kv_heads, 0, self.head_dim)
        empty = torch.zeros(shape, dtype=weight.dtype, device=device)
        return AttentionState(empty, empty, torch.zeros(batch, dtype=torch.long, device=device))

    def join_states(self, states: Sequence[AttentionState]) -> AttentionState:
        """Sequences of different lengths end in the last column; no column is empty in all."""
        length = torch.cat([state.length for state in states])
        columns = int(min(int(length.max()), self._kept)) if len(length) else 0
        keys, values = (
            torch.cat([_aligned(getattr(state, name), columns) for state in states])
            for name in ("keys", "values")
        )
        return AttentionState(keys, values, length)

    def state_size(self, tokens: int | None = None) -> float:
        columns = min(math.inf if tokens is None else tokens, self._kept)
        return 2 * self.kv_heads * self.head_dim * columns + 1

    def flops(self, context: int) -> float:
        window = min(self.config.window or context, context)
        seen = window - window * (window - 1) / (2 * context)  # tokens, on average
        return 4 * self.heads * self.head_dim * seen  # scores and weighted values

    @property
    def _kept(self) -> float:
        """How many columns of the cache the next token may see."""
        return math.inf if self.config.window is None else self.config.window - 1

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, H, T, D]"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState
    ) -> tuple[Tensor, AttentionState]:
        """Attention of T new tokens per sequence to cache and tokens.

        q is [N, H, T, D]; k and v are [N, kv_heads, T, D].
        """
        place = state.length[:, None] + torch.arange(q.shape[2], device=q.device)
        config = self.config
        q, k = rotated(q, k, place[:, None], config.rope_theta, config.rope_scaling)
        cached = state.keys.shape[2]
        if cached:
            k = torch.cat([state.keys.to(k.dtype), k], dim=2)
            v = torch.cat([state.values.to(v.dtype), v], dim=2)
        if cached == 0 and self.config.window is None:
            y = _attention(q, k, v, is_causal=True)
        elif q.shape[2] == 1 and cached <= self._kept and _all_filled(state.length, cached):
            y = _attention(q, k, v)  # one token that sees every column
        else:
            y = _masked_attention(q, k, v, state.length.clamp(max=cached), self.config.window)
        length = state.length + q.shape[2]
        first = k.shape[2] - int(min(k.shape[2], self._kept))
        if first > 0:  # copies, so that the memory of dropped columns can be freed
            k, v = k[:, :, first:].clone(), v[:, :, first:].clone()
        return y, AttentionState(k, v, length)

    def _attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState, cu_seqlens: Tensor
    ) -> tuple[Tensor, AttentionState]:
        """Attention in one packed row, sequence by sequence; their caches are then aligned."""
        bounds = cu_seqlens.tolist()
        if state.keys.shape[2] == 0 and _varlen_takes(q):
            return self._attend_packed_at_once(q, k, v, state, cu_seqlens, bounds)
        outputs, states = [], []
        for n, (begin, end) in enumerate(zip(bounds, bounds[1:])):
            entry = AttentionState(*(part[n : n + 1] for part in state))
            rows = slice(begin, end)
            y, after = self._attend(q[:, :, rows], k[:, :, rows], v[:, :, rows], entry)
            outputs.append(y)
            states.append(after)
        if not states:
            return q, state
        return torch.cat(outputs, dim=2), self.join_states(states)

    def _attend_packed_at_once(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: AttentionState,
        cu_seqlens: Tensor,
        bounds: list[int],
    ) -> tuple[Tensor, AttentionState]:
        """The same by one kernel for all sequences, from empty caches."""
        place = places(state.length, q.shape[2], cu_seqlens)
        config = self.config
        q, k = rotated(q, k, place[:, None], config.rope_theta, config.rope_scaling)
        longest = max(end - begin for begin, end in zip(bounds, bounds[1:]))
        # The kernel counts the tokens before the token itself; -1 stands for all.
        before = -1 if config.window is None else config.window - 1
        narrow = cu_seqlens.int()
        y = varlen_attention()(
            *(x[0].transpose(0, 1) for x in (q, k, v)), narrow, narrow, longest, longest,
            window_size=(before, 0), enable_gqa=self.heads != self.kv_heads,
        )  # fmt: skip
        # The last columns of every sequence, as far as it has them.
        kept = int(min(longest, self._kept))
        token = cu_seqlens[1:, None] - kept + torch.arange(kept, device=q.device)
        missing = token < cu_seqlens[:-1, None]
        token = token.masked_fill(missing, 0)
        keys, values = (
            x[0][:, token].masked_fill(missing[..., None], 0).transpose(0, 1) for x in (k, v)
        )
        length = state.length + cu_seqlens.diff()
        return y.transpose(0, 1)[None], AttentionState(keys, values, length)


def _varlen_takes(q: Tensor) -> bool:
    """Whether torch's attention for sequences of different lengths takes queries [1, H, T, D]."""
    return (
        q.device.type in VARLEN_ON
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[2] > 0
        and q.shape[3] % 8 == 0
        and q.shape[3] <= 256
        and (q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) >= (8, 0))
        and varlen_attention() is not None
    )


@functools.cache
def varlen_attention() -> Any:
    """torch's function, or None in versions of torch that have none, or one of other arguments.

    It is imported at its first use: it brings the compiler along.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"window_size", "enable_gqa"} <= {*known} else None


def _attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention of H query heads to as many, or to groups' shared, heads of keys and values."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **options)


def _all_filled(length: Tensor, columns: int) -> bool:
    """Whether no column is empty. False on a GPU, where finding out would wait for the device."""
    return length.device.type == "cpu" and bool((length >= columns).all())


def _aligned(cache: Tensor, columns: int) -> Tensor:
    """The last `columns` columns of a cache, with columns of zeros in front if it has fewer."""
    return F.pad(cache, (0, 0, columns - cache.shape[2], 0))


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, filled: Tensor, window: int | None
) -> Tensor:
    """Causal attention of the last T of S columns to all S, computed block by block.

    q is [N, H, T, D]; k and v are [N, kv_heads, S, D]. The first S - T columns are the cache; of
    these the last `filled` [N] hold tokens.
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
        outputs.append(_attention(q[:, :, start:stop], keys, values, attn_mask=seen))
    return torch.cat(outputs, dim=2) if outputs else torch.zeros_like(q)
