"""DeltaNet and Gated DeltaNet: a linear memory that is corrected by its error.

    x -> q, k, v (short convolution, SiLU) -> q, k to unit length per head
      -> beta, how much of the error is corrected; the decay (Gated DeltaNet)
      -> delta_rule -> RMSNorm per head -> * SiLU(gate) (Gated DeltaNet) -> output projection

Papers: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length"; Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule".
The equations of the memory are in ops/delta_rule/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..ops import delta_rule, silu_product, unit_length
from ..ops.recurrence import BACKENDS
from .base import Mixer, head_size
from .layers import DecayGate, RMSNorm, StreamConvolutions, blank_state, sequences, wide

#: The authors draw the rate from (0, 16); at 0 its log would be -inf, and stay so.
DECAY_RATE = (1e-4, 16.0)
DECAY_STEP = (1e-3, 0.1)


@dataclass
class DeltaNetMixerConfig:
    """heads: number of heads; None takes the model's `num_attention_heads`.

    head: size of a head's queries and keys; None takes width / heads.
    expand_v: size of a head's values as a multiple of that of its keys.
    conv_width: width of the causal convolution; 0 leaves it out.
    conv_on: the streams it acts on, of "q", "k" and "v". SiLU acts on all three in any case.
    use_gate: multiply the normalised output by SiLU(gate).
    allow_neg_eigval: beta in (0, 2) instead of (0, 1): what a key finds may change its sign.
    norm_eps: epsilon of the RMSNorm. backend: the op's backend.
    """

    #: Whether the memory decays: what sets Gated DeltaNet apart.
    decays: ClassVar[bool] = False

    heads: int | None = None
    head: int | None = None
    expand_v: float = 1.0
    conv_width: int = 4
    conv_on: tuple[str, ...] = ("q", "k", "v")
    use_gate: bool = False
    allow_neg_eigval: bool = False
    norm_eps: float = 1e-5
    backend: str = "auto"

    def __post_init__(self) -> None:
        checks.choice("backend", self.backend, BACKENDS)
        checks.at_least("conv_width", self.conv_width, 0)
        checks.at_least("norm_eps", self.norm_eps, 0, whole=False)
        checks.at_least("heads", self.heads, 1, optional=True)
        checks.at_least("head", self.head, 1, optional=True)
        checks.flag("use_gate", self.use_gate)
        checks.flag("allow_neg_eigval", self.allow_neg_eigval)
        self.conv_on = checks.streams("conv_on", self.conv_on) if self.conv_width else ()


@dataclass
class GatedDeltaNetMixerConfig(DeltaNetMixerConfig):
    """The fields of DeltaNetMixerConfig, for a memory that decays; the output is gated."""

    decays: ClassVar[bool] = True

    use_gate: bool = True


class DeltaNetState(NamedTuple):
    """The memory [N, H, K, V] and the last inputs of each convolution."""

    memory: Tensor
    q_tail: Tensor | None = None
    k_tail: Tensor | None = None
    v_tail: Tensor | None = None


class DeltaNetMixer(Mixer):
    #: The gates of the memory; the output's gate is a map like the others.
    no_weight_decay: tuple[str, ...] = ("b_proj.weight",)

    def __init__(self, dim: int, heads: int, config: DeltaNetMixerConfig):
        super().__init__()
        self.config = config
        self.heads = config.heads or heads
        self.key = config.head or head_size(dim, self.heads)
        self.value = _value_size(self.key, config.expand_v)
        keys = self.heads * self.key
        sizes = {"q": keys, "k": keys, "v": self.heads * self.value}

        self.q_proj = nn.Linear(dim, sizes["q"], bias=False)
        self.k_proj = nn.Linear(dim, sizes["k"], bias=False)
        self.v_proj = nn.Linear(dim, sizes["v"], bias=False)
        self.g_proj = nn.Linear(dim, sizes["v"], bias=False) if config.use_gate else None
        self.b_proj = nn.Linear(dim, self.heads, bias=False)
        self.a_proj: nn.Linear | None = None
        self.decay: DecayGate | None = None
        if config.decays:
            self.a_proj = nn.Linear(dim, self.heads, bias=False)
            self.no_weight_decay = ("b_proj.weight", "a_proj.weight")
            self.decay = DecayGate(self.heads, DECAY_RATE, DECAY_STEP)
        self.convolutions = StreamConvolutions(
            {stream: sizes[stream] for stream in config.conv_on}, config.conv_width
        )
        self.out_norm = RMSNorm(self.value, config.norm_eps)
        self.o_proj = nn.Linear(sizes["v"], dim, bias=False)

    def forward(
        self, x: Tensor, state: DeltaNetState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, DeltaNetState]:
        if state is None:
            state = self.init_state(sequences(x, cu_seqlens))
        projected = {"q": self.q_proj(x), "k": self.k_proj(x), "v": self.v_proj(x)}
        streams, tails = self.convolutions(projected, state, cu_seqlens)
        q, k, v = (self._heads(name, streams[name]) for name in ("q", "k", "v"))
        y, memory = delta_rule(
            unit_length(wide(q)), unit_length(wide(k)), v, self._corrections(x), self._decays(x),
            initial_state=state.memory, output_final_state=True,
            cu_seqlens=cu_seqlens, backend=self.config.backend,
        )  # fmt: skip
        assert memory is not None
        y = self.out_norm(y.to(x.dtype))
        if self.g_proj is not None:
            y = silu_product(self.g_proj(x).view_as(y), y)
        return self.o_proj(y.flatten(2)), DeltaNetState(memory, **tails)

    def init_state(self, batch: int) -> DeltaNetState:
        memory = blank_state(self.o_proj.weight, batch, self.heads, self.key, self.value)
        return DeltaNetState(memory, **self.convolutions.init_tails(batch))

    def state_size(self, tokens: int | None = None) -> float:
        return self.heads * self.key * self.value + self.convolutions.state_size()

    def flops(self, context: int) -> float:
        # The memory is multiplied by the key and by the query and gets an outer product; Gated
        # DeltaNet scales it first.
        memory = self.heads * self.key * self.value * (3 * 2 + self.config.decays)
        return memory + self.convolutions.flops()

    def _heads(self, name: str, stream: Tensor) -> Tensor:
        """[B, T, H * size] -> [B, T, H, size]"""
        if name not in self.convolutions:  # which ends in SiLU
            stream = F.silu(stream)
        return stream.unflatten(-1, (self.heads, -1))

    def _corrections(self, x: Tensor) -> Tensor:
        """beta [B, T, H]"""
        beta = wide(self.b_proj(x)).sigmoid()
        return 2 * beta if self.config.allow_neg_eigval else beta

    def _decays(self, x: Tensor) -> Tensor | None:
        """log_decay [B, T, H]"""
        if self.a_proj is None or self.decay is None:
            return None
        return self.decay(self.a_proj(x))


def _value_size(key: int, expand_v: float) -> int:
    checks.at_least("expand_v", expand_v, 0, whole=False)
    size = round(key * expand_v)
    if size < 1 or abs(size - key * expand_v) > 1e-6:
        raise ValueError(
            f"expand_v must make a whole number of the key size, {key}; got {expand_v}, which "
            f"makes {key * expand_v:g}"
        )
    return size
