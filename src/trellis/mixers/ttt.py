"""TTT-Linear: the state is a small model, trained on the keys and values that it reads.

    x -> p -> convolution -> q;  p -> another convolution -> k;  x -> v;  rotary places on q and k
      -> eta, the step size of each token
      -> ttt_linear -> LayerNorm over the width -> * GELU(gate) -> output projection

Paper: Sun et al. 2024, "Learning to (Learn at Test Time): RNNs with Expressive Hidden States". The
equations of the inner model are in ops/ttt/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..ops import TTTState, ttt_linear
from ..ops.recurrence import BACKENDS
from .base import Mixer, even_head_size, head_size
from .layers import StreamConvolutions, places, rotated, sequences, wide

#: Of the layer norm over the width, as in the op.
NORM_EPSILON = 1e-6


@dataclass
class TTTMixerConfig:
    """The defaults are the layer of the authors' Mamba backbone, which their results for TTT-Linear
    are with. Their Transformer backbone is share_qk=False, conv_width=0, output_gate=False. What
    they add around the layer, a convolution on the residual stream, is no part of the mixer.

    heads: number of heads; None takes the model's `num_attention_heads`.
    minibatch: tokens whose gradients are taken at the same inner model.
    base_lr: eta = base_lr * sigmoid(.) / head size.
    share_qk: q and k are two convolutions of one projection, instead of two projections.
    conv_width: width of the causal convolutions of q and k, with a bias and without an activation;
        0 leaves them out.
    output_gate: multiply the normed output by GELU(.) of the input, in the tanh form.
    rope_theta: base of the rotary frequencies of places in the mini-batch; None leaves them out.
    initial_std: spread of the inner model's learned start at initialisation; its bias starts at 0.
    backend: the op's backend.
    """

    heads: int | None = None
    minibatch: int = 16
    base_lr: float = 1.0
    share_qk: bool = True
    conv_width: int = 4
    output_gate: bool = True
    rope_theta: float | None = 10000.0
    initial_std: float = 0.02
    backend: str = "auto"

    def __post_init__(self) -> None:
        checks.choice("backend", self.backend, BACKENDS)
        checks.at_least("minibatch", self.minibatch, 1)
        checks.at_least("base_lr", self.base_lr, 0, whole=False)
        checks.at_least("conv_width", self.conv_width, 0)
        checks.at_least("initial_std", self.initial_std, 0, whole=False)
        checks.at_least("heads", self.heads, 1, optional=True)
        checks.at_least("rope_theta", self.rope_theta, 1, whole=False, optional=True)
        if self.share_qk and not self.conv_width:
            raise ValueError(
                "conv_width must be at least 1 with share_qk, or q and k would be the same; got 0"
            )


class TTTMixerState(NamedTuple):
    """The inner models, and the last inputs of the convolutions."""

    inner: TTTState
    q_tail: Tensor | None = None
    k_tail: Tensor | None = None


class TTTMixer(Mixer):
    no_weight_decay = ("eta_proj.weight",)

    def __init__(self, dim: int, heads: int, config: TTTMixerConfig):
        super().__init__()
        self.config = config
        self.heads = config.heads or heads
        self.head = head_size(dim, self.heads)
        if config.rope_theta is not None:
            even_head_size(self.head)
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = None if config.share_qk else nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.eta_proj = nn.Linear(dim, self.heads)
        self.g_proj = nn.Linear(dim, dim, bias=False) if config.output_gate else None
        streams = {"q": dim, "k": dim} if config.conv_width else {}
        # Biases of the size of the weights would make all keys alike at first.
        self.convolutions = StreamConvolutions(
            streams, config.conv_width, bias=True, zero_bias=True, activation="identity"
        )
        self.theta_offset = nn.Parameter(torch.empty(config.minibatch))
        self.initial_weight = nn.Parameter(torch.empty(self.heads, self.head, self.head))
        self.initial_bias = nn.Parameter(torch.empty(self.heads, self.head))
        self.norm_weight = nn.Parameter(torch.empty(self.heads, self.head))
        self.norm_bias = nn.Parameter(torch.empty(self.heads, self.head))
        self.out_norm = nn.LayerNorm(dim, eps=NORM_EPSILON)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """What is this mixer's own; its linear maps are the model's to initialise."""
        nn.init.zeros_(self.theta_offset)
        nn.init.normal_(self.initial_weight, std=self.config.initial_std)
        nn.init.zeros_(self.initial_bias)
        nn.init.ones_(self.norm_weight)
        nn.init.zeros_(self.norm_bias)

    def forward(
        self, x: Tensor, state: TTTMixerState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, TTTMixerState]:
        if state is None:
            state = self.init_state(sequences(x, cu_seqlens))
        q = self.q_proj(x)
        k = q if self.k_proj is None else self.k_proj(x)
        streams, tails = self.convolutions({"q": q, "k": k}, state, cu_seqlens)
        q, k, v = (self._split(s) for s in (streams["q"], streams["k"], self.v_proj(x)))
        if self.config.rope_theta is not None:
            assert state.inner.offset is not None
            place = places(state.inner.offset, x.shape[1], cu_seqlens)
            place = place.remainder(self.config.minibatch)
            q, k = rotated(q, k, place[..., None], self.config.rope_theta)
        eta = wide(self.eta_proj(x)).sigmoid() * (self.config.base_lr / self.head)
        y, inner = ttt_linear(
            q, k, v, eta, self._theta(), wide(self.norm_weight), wide(self.norm_bias),
            initial_state=state.inner, output_final_state=True, cu_seqlens=cu_seqlens,
            backend=self.config.backend,
        )  # fmt: skip
        assert inner is not None
        y = self.out_norm(y.flatten(2))
        if self.g_proj is not None:
            y = y * F.gelu(self.g_proj(x), approximate="tanh")
        return self.o_proj(y), TTTMixerState(inner, **tails)

    def init_state(self, batch: int) -> TTTMixerState:
        weight, bias = wide(self.initial_weight), wide(self.initial_bias)
        inner = TTTState(
            weight.expand(batch, *weight.shape),
            bias.expand(batch, *bias.shape),
            weight.new_zeros(batch, *weight.shape),
            bias.new_zeros(batch, *bias.shape),
            torch.zeros(batch, dtype=torch.long, device=weight.device),
        )
        return TTTMixerState(inner, **self.convolutions.init_tails(batch))

    def state_size(self, tokens: int | None = None) -> float:
        # The model, the steps of the mini-batch under way, and its offset.
        inner = 2 * self.heads * (self.head + 1) * self.head + 1
        return inner + self.convolutions.state_size()

    def flops(self, context: int) -> float:
        # The model multiplies the key and the query; an outer product is added to the steps and
        # these, times theta, to the model.
        inner = self.heads * (self.head + 1) * self.head * 4 * 2
        return inner + self.convolutions.flops()

    def _theta(self) -> Tensor:
        """The factor of each place: at first the mean of the steps so far."""
        offset = wide(self.theta_offset)
        count = torch.arange(1, len(offset) + 1, device=offset.device)
        return (offset + 1 / count.to(offset.dtype)).clamp(min=0)

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, T, H, D]"""
        return x.unflatten(-1, (self.heads, self.head))
