"""TTT-Linear: the state is a small linear model, trained on the keys and values that it reads.

    x + convolution(x) -> p, v, eta (the step size of each token), gate
      p -> convolution -> q;  p -> another convolution -> k;  rotary places on q and k
      -> ttt_linear -> LayerNorm over the width -> * GELU(gate) -> output projection

Paper: Sun et al. 2024, "Learning to (Learn at Test Time): RNNs with Expressive Hidden States". The
equations of the inner model are in ops/ttt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..ops import TTTState, ttt_linear
from ..ops.recurrence import BACKENDS
from .base import Mixer, check_even_head_dim, head_dim_of
from .layers import ShortConvolution, StreamConvolutions, places, rotated, sequences, wide

#: Epsilon of the layer norm over the width; the op has the same.
NORM_EPSILON = 1e-6


@dataclass
class TTTMixerConfig:
    """The defaults are the layer in the authors' Mamba backbone, with which they report TTT-Linear.
    The layer in their Transformer backbone is share_qk=False, conv_width=0, output_gate=False.

    heads: number of heads; None takes the model's `num_attention_heads`.
    minibatch: tokens per mini-batch, whose gradients are all taken at the same inner model.
    base_lr: scale of the step sizes, eta = base_lr * sigmoid(.) / head_dim.
    share_qk: q and k are two convolutions of one projection, instead of two projections.
    conv_width: width of all causal convolutions; 0 leaves them out. They have a bias, which starts
        at 0, and no activation.
    pre_conv: the layer's input is x + convolution(x), as in all models that the authors train.
        Theirs adds the convolution to the residual stream itself, in front of the layer's norm;
        here, where the layer gets x from its norm, the layer alone sees it.
    output_gate: multiply the normed output by GELU(gate), in the tanh form.
    rope_theta: base of the rotary frequencies; positions count within a mini-batch. None leaves
        positions out.
    initial_std: standard deviation from which the inner model's learned initial weight is drawn;
        its learned initial bias starts at 0.
    backend: which implementation of the inner model runs, such as "auto" or "reference".
    """

    heads: int | None = None
    minibatch: int = 16
    base_lr: float = 1.0
    share_qk: bool = True
    conv_width: int = 4
    pre_conv: bool = True
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
        checks.flag("pre_conv", self.pre_conv)
        self.pre_conv = self.pre_conv and self.conv_width > 0
        if self.share_qk and not self.conv_width:
            raise ValueError(
                "conv_width must be at least 1 with share_qk, or q and k would be the same; got 0"
            )


class TTTMixerState(NamedTuple):
    """The inner models of N sequences, and the last inputs of the convolutions."""

    inner: TTTState
    x_tail: Tensor | None = None
    q_tail: Tensor | None = None
    k_tail: Tensor | None = None


class TTTMixer(Mixer):
    no_weight_decay = ("eta_proj.weight",)

    def __init__(self, dim: int, heads: int, config: TTTMixerConfig):
        super().__init__()
        self.config = config
        self.heads = config.heads or heads
        self.head_dim = head_dim_of(dim, self.heads)
        if config.rope_theta is not None:
            check_even_head_dim(self.head_dim)
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = None if config.share_qk else nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.eta_proj = nn.Linear(dim, self.heads)
        self.g_proj = nn.Linear(dim, dim, bias=False) if config.output_gate else None
        streams = {"q": dim, "k": dim} if config.conv_width else {}
        # The authors train in JAX, whose biases start at zero; biases as large as the weights would
        # make all keys alike at first.
        options: dict[str, Any] = {"bias": True, "zero_bias": True, "activation": "identity"}
        self.convolutions = StreamConvolutions(streams, config.conv_width, **options)
        self.pre_convolution: ShortConvolution | None = None
        if config.pre_conv:
            self.pre_convolution = ShortConvolution(dim, config.conv_width, **options)
        self.theta_offset = nn.Parameter(torch.empty(config.minibatch))
        self.initial_weight = nn.Parameter(torch.empty(self.heads, self.head_dim, self.head_dim))
        self.initial_bias = nn.Parameter(torch.empty(self.heads, self.head_dim))
        self.norm_weight = nn.Parameter(torch.empty(self.heads, self.head_dim))
        self.norm_bias = nn.Parameter(torch.empty(self.heads, self.head_dim))
        self.out_norm = nn.LayerNorm(dim, eps=NORM_EPSILON)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise this mixer's own parameters; the model initialises the linear maps."""
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
        x_tail = state.x_tail
        if self.pre_convolution is not None:
            convolved, x_tail = self.pre_convolution(x, x_tail, cu_seqlens)
            x = x + convolved
        q = self.q_proj(x)
        k = q if self.k_proj is None else self.k_proj(x)
        streams, tails = self.convolutions({"q": q, "k": k}, state, cu_seqlens)
        q, k, v = (self._split(s) for s in (streams["q"], streams["k"], self.v_proj(x)))
        if self.config.rope_theta is not None:
            assert state.inner.offset is not None
            place = places(state.inner.offset, x.shape[1], cu_seqlens)
            place = place.remainder(self.config.minibatch)
            q, k = rotated(q, k, place[..., None], self.config.rope_theta)
        eta = wide(self.eta_proj(x)).sigmoid() * (self.config.base_lr / self.head_dim)
        y, inner = ttt_linear(
            q, k, v, eta, self._theta(), wide(self.norm_weight), wide(self.norm_bias),
            initial_state=state.inner, output_final_state=True, cu_seqlens=cu_seqlens,
            backend=self.config.backend,
        )  # fmt: skip
        assert inner is not None
        y = self.out_norm(y.flatten(2))
        if self.g_proj is not None:
            y = y * F.gelu(self.g_proj(x), approximate="tanh")
        return self.o_proj(y), TTTMixerState(inner, x_tail, **tails)

    def init_state(self, batch: int) -> TTTMixerState:
        weight, bias = wide(self.initial_weight), wide(self.initial_bias)
        inner = TTTState(
            weight.expand(batch, *weight.shape),
            bias.expand(batch, *bias.shape),
            weight.new_zeros(batch, *weight.shape),
            bias.new_zeros(batch, *bias.shape),
            torch.zeros(batch, dtype=torch.long, device=weight.device),
        )
        before = self.pre_convolution
        x_tail = None if before is None else before.init_tail(batch)
        return TTTMixerState(inner, x_tail, **self.convolutions.init_tails(batch))

    def state_size(self, tokens: int | None = None) -> float:
        # The inner model, the sum of the steps of the mini-batch so far, and the offset in it.
        inner = 2 * self.heads * (self.head_dim + 1) * self.head_dim + 1
        return inner + self._pre_weights(1) + self.convolutions.state_size()

    def flops(self, context: int) -> float:
        # Four multiply-adds for every number of the inner model: it is applied to the key and to
        # the query, an outer product is added to the steps, and the steps times theta to the model.
        inner = self.heads * (self.head_dim + 1) * self.head_dim * 4 * 2
        return inner + 2 * self._pre_weights(0) + self.convolutions.flops()

    def _pre_weights(self, first: int) -> int:
        """Weights of the convolution in front, without the first taps; 0 if there is none."""
        before = self.pre_convolution
        return 0 if before is None else before.weight[:, first:].numel()

    def _theta(self) -> Tensor:
        """The factor of each place i of a mini-batch, at least 0; 1 / i at initialisation."""
        offset = wide(self.theta_offset)
        count = torch.arange(1, len(offset) + 1, device=offset.device)
        return (offset + 1 / count.to(offset.dtype)).clamp(min=0)

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, T, H, D]"""
        return x.unflatten(-1, (self.heads, self.head_dim))
