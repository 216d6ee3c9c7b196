"""Linear attention: a feature map replaces the softmax, a memory of fixed size replaces the cache.

    x -> q, k, v -> feature map on q and k -> linear_attention -> output projection

Paper: Katharopoulos et al. 2020, "Transformers are RNNs". The equations of the memory are in
ops/linear_attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..ops import LinearAttentionState, linear_attention
from ..ops.recurrence import BACKENDS
from .base import Mixer, head_dim_of
from .layers import RMSNorm, blank_state, sequences, wide

FEATURE_MAPS = {"elu": lambda x: F.elu(x) + 1, "relu": F.relu, "identity": lambda x: x}


@dataclass
class LinearAttentionMixerConfig:
    """The choices of linear attention.

    heads: number of heads; None takes the model's `num_attention_heads`.
    feature_map: applied to queries and keys: "elu" (elu(x) + 1, the paper's), "relu" or "identity".
    normalize: divide by the running sum of the keys' weights, as a softmax does. None means true
        for "elu" and "relu", and false for "identity", whose weights may be negative.
    normalizer_eps: added to that sum.
    output_norm: put an RMSNorm on each head's output.
    norm_eps: epsilon of the RMSNorm.
    backend: which implementation of the memory runs, such as "auto" or "reference".
    """

    heads: int | None = None
    feature_map: str = "elu"
    normalize: bool | None = None
    normalizer_eps: float = 1e-6
    output_norm: bool = False
    norm_eps: float = 1e-6
    backend: str = "auto"

    def __post_init__(self) -> None:
        checks.choice("feature_map", self.feature_map, tuple(FEATURE_MAPS))
        checks.choice("backend", self.backend, BACKENDS)
        checks.positive("normalizer_eps", self.normalizer_eps)
        checks.flag("output_norm", self.output_norm)
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


class LinearAttentionMixer(Mixer):
    def __init__(self, dim: int, heads: int, config: LinearAttentionMixerConfig):
        super().__init__()
        self.config = config
        self.heads = config.heads or heads
        self.head_dim = head_dim_of(dim, self.heads)
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.out_norm = RMSNorm(self.head_dim, config.norm_eps) if config.output_norm else None
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(
        self, x: Tensor, state: LinearAttentionState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, LinearAttentionState]:
        config = self.config
        if state is None:
            state = self.init_state(sequences(x, cu_seqlens))
        features = FEATURE_MAPS[config.feature_map]
        q, k = (features(wide(self._split(project(x)))) for project in (self.q_proj, self.k_proj))
        y, state = linear_attention(
            q, k, self._split(self.v_proj(x)),
            scale=1.0 if config.normalize else self.head_dim**-0.5,
            normalize=bool(config.normalize), eps=config.normalizer_eps,
            initial_state=state, output_final_state=True,
            cu_seqlens=cu_seqlens, backend=config.backend,
        )  # fmt: skip
        assert state is not None
        y = y.to(x.dtype)
        if self.out_norm is not None:
            y = self.out_norm(y)
        return self.o_proj(y.flatten(2)), state

    def init_state(self, batch: int) -> LinearAttentionState:
        weight = self.o_proj.weight
        memory = blank_state(weight, batch, self.heads, self.head_dim, self.head_dim)
        if not self.config.normalize:
            return LinearAttentionState(memory)
        return LinearAttentionState(memory, blank_state(weight, batch, self.heads, self.head_dim))

    def state_size(self, tokens: int | None = None) -> float:
        return self.heads * self.head_dim * self._columns

    def flops(self, context: int) -> float:
        # An outer product is added to the memory, and the query multiplied by it.
        return 4 * self.heads * self.head_dim * self._columns

    @property
    def _columns(self) -> int:
        """Columns of a head's memory, the running sum of the keys counted as one more."""
        return self.head_dim + bool(self.config.normalize)

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, T, H, D]"""
        return x.unflatten(-1, (self.heads, self.head_dim))
