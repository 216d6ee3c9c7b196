"""Linear attention: a feature map replaces the softmax, a memory of fixed size replaces the cache.

    x -> q, k, v (short convolution) -> feature map on q and k -> linear_attention
      -> RMSNorm per head -> * SiLU(gate) -> output projection

Paper: Katharopoulos et al. 2020, "Transformers are RNNs". The equations of the memory are in
ops/linear_attention. The convolution, the norm and the gate are not the paper's: later recurrent
layers have them around their memories, and this is the baseline beside those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..ops import LinearAttentionState, linear_attention, silu_product
from ..ops.recurrence import BACKENDS
from .base import Mixer, head_dim_of
from .layers import RMSNorm, StreamConvolutions, as_projected, blank_state, sequences, wide

FEATURE_MAPS = {"elu": lambda x: F.elu(x) + 1, "relu": F.relu, "identity": lambda x: x}


@dataclass
class LinearAttentionMixerConfig:
    """The choices of linear attention. The paper's own layer, with nothing around the memory, is
    conv_width=0, output_norm=False, output_gate=False.

    heads: number of heads; None takes the model's `num_attention_heads`.
    feature_map: applied to queries and keys: "elu" (elu(x) + 1, the paper's), "relu" or "identity".
    normalize: divide by the running sum of the keys' weights, as a softmax does. None means true
        for "elu" and "relu", and false for "identity", whose weights may be negative.
    normalizer_eps: added to that sum.
    conv_width: width of a causal convolution without activation; 0 leaves it out. It tells the
        layer about the order of tokens, of which the memory, a sum, knows nothing.
    conv_on: the convolved streams, some of "q", "k" and "v".
    output_norm: put an RMSNorm on each head's output.
    output_gate: multiply the output by SiLU(gate). Norm and gate are on by default because the
        Trellis paper gives them to all its recurrent baselines.
    norm_eps: epsilon of the RMSNorm.
    backend: which implementation of the memory runs, such as "auto" or "reference".
    """

    heads: int | None = None
    feature_map: str = "elu"
    normalize: bool | None = None
    normalizer_eps: float = 1e-6
    conv_width: int = 4
    conv_on: tuple[str, ...] = ("q", "k", "v")
    output_norm: bool = True
    output_gate: bool = True
    norm_eps: float = 1e-6
    backend: str = "auto"

    def __post_init__(self) -> None:
        checks.choice("feature_map", self.feature_map, tuple(FEATURE_MAPS))
        checks.choice("backend", self.backend, BACKENDS)
        checks.positive("normalizer_eps", self.normalizer_eps)
        checks.at_least("conv_width", self.conv_width, 0)
        self.conv_on = checks.streams("conv_on", self.conv_on) if self.conv_width else ()
        checks.flag("output_norm", self.output_norm)
        checks.flag("output_gate", self.output_gate)
        checks.at_least("norm_eps", self.norm_eps, 0, whole=False)
        checks.at_least("heads", self.heads, 1, optional=True)
        signed = self.feature_map == "identity"
        if self.normalize is None:
            self.normalize = not signed
        checks.flag("normalize", self.normalize)
        if self.normalize and signed:
            raise ValueError(
                "normalize must be False with feature_map='identity', whose weights may sum to "
                "zero; got True"
            )


class LinearAttentionMixerState(NamedTuple):
    """The memories of N sequences, and the last inputs of each convolution."""

    memory: LinearAttentionState
    q_tail: Tensor | None = None
    k_tail: Tensor | None = None
    v_tail: Tensor | None = None


class LinearAttentionMixer(Mixer):
    def __init__(self, dim: int, heads: int, config: LinearAttentionMixerConfig):
        super().__init__()
        self.config = config
        self.heads = config.heads or heads
        self.head_dim = head_dim_of(dim, self.heads)
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.g_proj = nn.Linear(dim, dim, bias=False) if config.output_gate else None
        # No activation: the feature map is the non-linearity of q and k. SiLU before it would keep
        # all weights above 0.75, where no key can be passed over.
        self.convolutions = StreamConvolutions(
            {stream: dim for stream in config.conv_on}, config.conv_width, activation="identity"
        )
        self.out_norm = RMSNorm(self.head_dim, config.norm_eps) if config.output_norm else None
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(
        self,
        x: Tensor,
        state: LinearAttentionMixerState | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, LinearAttentionMixerState]:
        config = self.config
        if state is None:
            state = self.init_state(sequences(x, cu_seqlens))
        features = FEATURE_MAPS[config.feature_map]
        projected = {"q": self.q_proj(x), "k": self.k_proj(x), "v": self.v_proj(x)}
        streams, tails = self.convolutions(projected, state, cu_seqlens)
        q, k, v = (self._split(streams[name]) for name in ("q", "k", "v"))
        q, k = (as_projected(features(wide(x)), x) for x in (q, k))
        y, memory = linear_attention(
            q, k, v,
            scale=1.0 if config.normalize else self.head_dim**-0.5,
            normalize=bool(config.normalize), eps=config.normalizer_eps,
            initial_state=state.memory, output_final_state=True,
            cu_seqlens=cu_seqlens, backend=config.backend,
        )  # fmt: skip
        assert memory is not None
        y = y.to(x.dtype)
        if self.out_norm is not None:
            y = self.out_norm(y)
        if self.g_proj is not None:
            y = silu_product(self._split(self.g_proj(x)), y)
        return self.o_proj(y.flatten(2)), LinearAttentionMixerState(memory, **tails)

    def init_state(self, batch: int) -> LinearAttentionMixerState:
        weight = self.o_proj.weight
        memory = LinearAttentionState(
            blank_state(weight, batch, self.heads, self.head_dim, self.head_dim)
        )
        if self.config.normalize:
            memory = memory._replace(
                normalizer=blank_state(weight, batch, self.heads, self.head_dim)
            )
        return LinearAttentionMixerState(memory, **self.convolutions.init_tails(batch))

    def state_size(self, tokens: int | None = None) -> float:
        return self.heads * self.head_dim * self._columns + self.convolutions.state_size()

    def flops(self, context: int) -> float:
        # An outer product is added to the memory, and the query multiplied by it.
        return 4 * self.heads * self.head_dim * self._columns + self.convolutions.flops()

    @property
    def _columns(self) -> int:
        """Columns of a head's memory, the running sum of the keys counted as one more."""
        return self.head_dim + bool(self.config.normalize)

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, T, H, D]"""
        return x.unflatten(-1, (self.heads, self.head_dim))
