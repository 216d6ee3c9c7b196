"""Mamba2: a state-space model whose state is the memory of linear attention with a decay.

    x -> gate z; x, B, C (short convolution and SiLU); dt
      -> dt = softplus(dt + dt_bias), log_decay = -exp(A_log) dt
      -> linear_attention with q = C, k = B, v = dt x -> + D x
      -> RMSNorm(y * SiLU(z)) -> output projection

Paper: Dao & Gu 2024, "Transformers are SSMs". The equations of the memory are in
ops/linear_attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import checks
from ..ops import linear_attention, silu_product
from ..ops.recurrence import BACKENDS
from .base import Mixer
from .layers import DecayGate, RMSNorm, ShortConvolution, as_projected, blank_state, sequences


@dataclass
class Mamba2MixerConfig:
    """The choices of Mamba2. All defaults are the authors'.

    The model's `num_attention_heads` is not used: the width and `head_dim` give the heads. At the
    start exp(A_log) and softplus(dt_bias) are drawn from the ranges below, D is 1, and weights and
    bias of the convolution are uniform in +- 1 / sqrt(conv_width). The authors draw in_proj with
    the standard deviation 1 / sqrt(3 n) for n inputs, and out_proj with that over sqrt(layers);
    the models of this library draw the first 4% narrower, the second over sqrt(2 layers), as all
    mixers' maps, because an MLP follows every mixer.

    state_dim: size of B and C, which is the number of rows of a head's memory.
    head_dim: width of a head. An inner width below it makes one head of the whole inner width.
    heads: number of heads, in place of `head_dim`; None takes inner width / head_dim.
    expand: inner width / width.
    groups: number of groups of heads; the heads of a group share B and C.
    conv_width: width of the causal convolution.
    conv_bias: whether the convolution has a bias.
    decay_rate, decay_step: ranges in which exp(A_log) and softplus(dt_bias) start.
    step_floor: lower bound of the values at which softplus(dt_bias) starts.
    step_limit: range (low, high) to which dt is clamped; None does not clamp.
    norm_eps: epsilon of the RMSNorm.
    backend: which implementation of the memory runs, such as "auto" or "reference".
    """

    state_dim: int = 128
    head_dim: int = 64
    heads: int | None = None
    expand: int = 2
    groups: int = 1
    conv_width: int = 4
    conv_bias: bool = True
    decay_rate: tuple[float, float] = (1.0, 16.0)
    decay_step: tuple[float, float] = (1e-3, 0.1)
    step_floor: float = 1e-4
    step_limit: tuple[float, float] | None = None
    norm_eps: float = 1e-5
    backend: str = "auto"

    def __post_init__(self) -> None:
        checks.choice("backend", self.backend, BACKENDS)
        for name in ("state_dim", "head_dim", "expand", "groups", "conv_width"):
            checks.at_least(name, getattr(self, name), 1)
        checks.at_least("heads", self.heads, 1, optional=True)
        checks.at_least("step_floor", self.step_floor, 0, whole=False)
        checks.at_least("norm_eps", self.norm_eps, 0, whole=False)
        checks.flag("conv_bias", self.conv_bias)
        self.decay_rate = checks.number_range("decay_rate", self.decay_rate, 0)
        self.decay_step = checks.number_range("decay_step", self.decay_step, 0)
        if self.step_limit is not None:
            self.step_limit = checks.number_range("step_limit", self.step_limit, 0, open_end=True)


class Mamba2State(NamedTuple):
    """memory: [N, H, state_dim, head_dim]. tail: the last inputs of the convolution."""

    memory: Tensor
    tail: Tensor


class Mamba2Mixer(Mixer):
    no_weight_decay = ("D",)

    def __init__(self, dim: int, heads: int, config: Mamba2MixerConfig):
        super().__init__()
        self.config = config
        self.inner_dim = config.expand * dim
        self.heads, self.head_dim = _heads(self.inner_dim, config)
        if self.heads % config.groups:
            raise ValueError(
                f"groups must divide the number of heads, {self.heads}; got {config.groups}"
            )
        convolved = self.inner_dim + 2 * config.groups * config.state_dim
        self.in_proj = nn.Linear(dim, self.inner_dim + convolved + self.heads, bias=False)
        self.convolution = ShortConvolution(convolved, config.conv_width, config.conv_bias)
        self.decay = DecayGate(self.heads, config.decay_rate, config.decay_step, config.step_floor)
        self.D = nn.Parameter(torch.empty(self.heads))
        self.out_norm = RMSNorm(self.inner_dim, config.norm_eps)
        self.out_proj = nn.Linear(self.inner_dim, dim, bias=False)
        self.reset_parameters()

    @property
    def output_projection(self) -> nn.Linear:
        return self.out_proj

    def reset_parameters(self) -> None:
        nn.init.ones_(self.D)

    def forward(
        self, x: Tensor, state: Mamba2State | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Mamba2State]:
        config = self.config
        if state is None:
            state = self.init_state(sequences(x, cu_seqlens))
        keys = config.groups * config.state_dim
        sizes = [self.inner_dim, self.inner_dim + 2 * keys, self.heads]
        gate, mixed, dt = self.in_proj(x).split(sizes, dim=-1)
        mixed, tail = self.convolution(mixed, state.tail, cu_seqlens)
        x, B, C = mixed.split([self.inner_dim, keys, keys], dim=-1)
        x = x.unflatten(-1, (self.heads, self.head_dim))
        steps = self.decay.steps(dt)
        if config.step_limit is not None:
            steps = steps.clamp(*config.step_limit)
        y, final = linear_attention(
            C.unflatten(-1, (config.groups, -1)), B.unflatten(-1, (config.groups, -1)),
            as_projected(steps[..., None] * x, x), self.decay.log_decay(steps),
            initial_state=state.memory, output_final_state=True,
            cu_seqlens=cu_seqlens, backend=config.backend,
        )  # fmt: skip
        assert final is not None
        y = torch.addcmul(y, x, self.D[:, None].to(x.dtype)).flatten(2)
        y = self.out_norm(silu_product(gate, y))
        return self.out_proj(y), Mamba2State(final.memory, tail)

    def init_state(self, batch: int) -> Mamba2State:
        shape = (batch, self.heads, self.config.state_dim, self.head_dim)
        memory = blank_state(self.out_proj.weight, *shape)
        return Mamba2State(memory, self.convolution.init_tail(batch))

    def state_size(self, tokens: int | None = None) -> float:
        return self._memory + self.convolution.weight[:, 1:].numel()

    def flops(self, context: int) -> float:
        # The memory is scaled by its decay (1), an outer product is added to it (2), and it is
        # multiplied by C (2).
        return 5 * self._memory + 2 * self.convolution.weight.numel() + 2 * self.inner_dim

    @property
    def _memory(self) -> int:
        """How many numbers the memories of all heads hold."""
        return self.inner_dim * self.config.state_dim


def _heads(inner_dim: int, config: Mamba2MixerConfig) -> tuple[int, int]:
    """The number of heads and the width of each."""
    if config.heads is not None:
        if inner_dim % config.heads:
            raise ValueError(
                f"heads must divide the inner width, expand * width = {inner_dim}; "
                f"got {config.heads}"
            )
        return config.heads, inner_dim // config.heads
    head_dim = min(config.head_dim, inner_dim)
    if inner_dim % head_dim:
        raise ValueError(
            f"head_dim must divide the inner width, expand * width = {inner_dim}; got {head_dim}. "
            "`heads` sets the number of heads instead"
        )
    return inner_dim // head_dim, head_dim
