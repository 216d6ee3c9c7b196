"""DeltaNet and Gated DeltaNet: a linear memory, corrected at every token by its error.

    x -> q, k, v (short convolution, SiLU) -> q, k to unit length per head
      -> beta, how much of the error is corrected; the decay (Gated DeltaNet)
      -> delta_rule -> RMSNorm per head -> * SiLU(gate) -> output projection

Papers: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length"; Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule".
The equations of the memory are in ops/delta_rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..ops import delta_rule, silu_product, unit_length
from ..ops.recurrence import BACKENDS
from .base import Mixer, Shapes, head_sizes
from .layers import (
    DecayGate,
    RMSNorm,
    StreamConvolutions,
    as_projected,
    blank_state,
    sequences,
    wide,
)

#: The authors draw the rate from (0, 16). Here it starts above 0, because the log of 0 is -inf.
DECAY_RATE = (1e-4, 16.0)
DECAY_STEP = (1e-3, 0.1)
SHAPES: Shapes = {"authors": (0.75, 2.0, 256), "square": (1.0, 1.0, 128), "model": None}


@dataclass
class DeltaNetMixerConfig:
    """The choices of DeltaNet.

    shape: sets those of the next three fields that are None.
        "authors": few, large heads, as the authors of Gated DeltaNet have them. The keys of all
        heads together are 0.75 of the model's width, and values are twice as wide as keys. The
        number of heads is the smallest one, 1 or even, that divides the keys into heads of at most
        256: 1 head of 48 keys at width 64, 1 of 96 at 128, 4 of 144 at 768, 6 of 256 at 2048.
        "square": as in the DeltaNet paper, which has no output gate. All keys and all values are
        as wide as the model, and the number of heads is the smallest one, 1 or even, that makes
        heads of at most 128: 6 of 128 at width 768.
        "model": the model's `num_attention_heads`, with keys and values of width / heads. The
        memory is then as large as that of linear attention.
    heads: number of heads.
    head_dim: size of a head's queries and keys.
    expand_v: size of a head's values as a multiple of the size of its keys.
    conv_width: width of the causal convolution; 0 leaves it out.
    conv_on: the convolved streams, some of "q", "k" and "v". SiLU acts on all three in any case.
    use_gate: multiply the normalised output by SiLU(gate). The DeltaNet paper has no gate; it is
        on by default because the Trellis paper gives all its recurrent baselines norm and gate.
    allow_neg_eigval: beta in (0, 2) instead of (0, 1), so that the factor 1 - beta of what the
        memory holds at a key may be negative.
    norm_eps: epsilon of the RMSNorm.
    backend: which implementation of the memory runs, such as "auto" or "reference".
    """

    #: Whether the memory decays. It does in Gated DeltaNet only.
    decays: ClassVar[bool] = False

    shape: str = "authors"
    heads: int | None = None
    head_dim: int | None = None
    expand_v: float | None = None
    conv_width: int = 4
    conv_on: tuple[str, ...] = ("q", "k", "v")
    use_gate: bool = True
    allow_neg_eigval: bool = False
    norm_eps: float = 1e-5
    backend: str = "auto"

    def __post_init__(self) -> None:
        checks.choice("shape", self.shape, tuple(SHAPES))
        checks.choice("backend", self.backend, BACKENDS)
        checks.at_least("conv_width", self.conv_width, 0)
        checks.at_least("norm_eps", self.norm_eps, 0, whole=False)
        checks.at_least("heads", self.heads, 1, optional=True)
        checks.at_least("head_dim", self.head_dim, 1, optional=True)
        checks.flag("use_gate", self.use_gate)
        checks.flag("allow_neg_eigval", self.allow_neg_eigval)
        self.conv_on = checks.streams("conv_on", self.conv_on) if self.conv_width else ()


@dataclass
class GatedDeltaNetMixerConfig(DeltaNetMixerConfig):
    """The fields of DeltaNetMixerConfig. The memory decays."""

    decays: ClassVar[bool] = True


class DeltaNetState(NamedTuple):
    """The memory [N, H, key_dim, value_dim] and the last inputs of each convolution."""

    memory: Tensor
    q_tail: Tensor | None = None
    k_tail: Tensor | None = None
    v_tail: Tensor | None = None


class DeltaNetMixer(Mixer):
    #: Exempt from weight decay: the maps that make the memory's gates, not the output's gate.
    no_weight_decay: tuple[str, ...] = ("b_proj.weight",)
    like_attention: ClassVar[dict[str, Any]] = {"shape": "model"}

    def __init__(self, dim: int, heads: int, config: DeltaNetMixerConfig):
        super().__init__()
        self.config = config
        self.heads, self.key_dim, self.value_dim = head_sizes(dim, heads, config, SHAPES)
        keys = self.heads * self.key_dim
        sizes = {"q": keys, "k": keys, "v": self.heads * self.value_dim}

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
        self.out_norm = RMSNorm(self.value_dim, config.norm_eps)
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
            as_projected(unit_length(wide(q)), q), as_projected(unit_length(wide(k)), k), v,
            self._corrections(x), self._decays(x),
            initial_state=state.memory, output_final_state=True,
            cu_seqlens=cu_seqlens, backend=self.config.backend,
        )  # fmt: skip
        assert memory is not None
        y = self.out_norm(y.to(x.dtype))
        if self.g_proj is not None:
            y = silu_product(self.g_proj(x).view_as(y), y)
        return self.o_proj(y.flatten(2)), DeltaNetState(memory, **tails)

    def init_state(self, batch: int) -> DeltaNetState:
        memory = blank_state(self.o_proj.weight, batch, self.heads, self.key_dim, self.value_dim)
        return DeltaNetState(memory, **self.convolutions.init_tails(batch))

    def state_size(self, tokens: int | None = None) -> float:
        return self.heads * self.key_dim * self.value_dim + self.convolutions.state_size()

    def flops(self, context: int) -> float:
        # The memory is multiplied by the key and by the query and an outer product is added to it;
        # Gated DeltaNet also scales it.
        memory = self.heads * self.key_dim * self.value_dim * (3 * 2 + self.config.decays)
        return memory + self.convolutions.flops()

    def _heads(self, name: str, stream: Tensor) -> Tensor:
        """[B, T, H * size] -> [B, T, H, size]"""
        if name not in self.convolutions:  # a convolution ends in SiLU itself
            stream = F.silu(stream)
        return stream.unflatten(-1, (self.heads, -1))

    def _corrections(self, x: Tensor) -> Tensor:
        """beta [B, T, H], how much of the error is corrected."""
        beta = wide(self.b_proj(x)).sigmoid()
        return 2 * beta if self.config.allow_neg_eigval else beta

    def _decays(self, x: Tensor) -> Tensor | None:
        """log_decay [B, T, H]; None if the memory does not decay."""
        if self.a_proj is None or self.decay is None:
            return None
        return self.decay(self.a_proj(x))
