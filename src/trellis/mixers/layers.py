"""Small modules that several mixers share."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import causal_convolution


class ShortConvolution(nn.Module):
    """Causal depthwise convolution, then SiLU. Its state is the tail, [N, width - 1, dim]."""

    def __init__(self, dim: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self, x: Tensor, tail: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        y, tail = causal_convolution(x, self.weight, tail=tail, cu_seqlens=cu_seqlens)
        return F.silu(y), tail

    def init_tail(self, batch: int) -> Tensor:
        return self.weight.new_zeros(batch, self.weight.shape[1] - 1, self.weight.shape[0])


class DecayGate(nn.Module):
    """log_beta = -exp(A_log) softplus(x + dt_bias), at most 0: the gate of Mamba2.

    exp(A_log) starts uniform in `rate`, softplus(dt_bias) log-uniform in `step`. Neither is
    subject to weight decay: `no_weight_decay` names them for optimizers.
    """

    no_weight_decay = ("A_log", "dt_bias")

    def __init__(self, heads: int, rate: tuple[float, float], step: tuple[float, float]):
        super().__init__()
        self.rate, self.step = rate, step
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        low, high = self.rate
        rates = torch.empty(self.A_log.shape, device=self.A_log.device).uniform_(low, high)
        low, high = (math.log(bound) for bound in self.step)
        steps = torch.empty_like(rates).uniform_(low, high).exp()
        assign_(self.A_log, rates.log())
        assign_(self.dt_bias, steps + torch.log(-torch.expm1(-steps)))  # softplus's inverse

    def forward(self, x: Tensor) -> Tensor:
        return -wide(self.A_log).exp() * F.softplus(wide(x) + wide(self.dt_bias))


def assign_(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter, unless transformers has marked it as filled from a checkpoint."""
    if not getattr(parameter, "_is_hf_initialized", False):
        parameter.copy_(value)


def wide(x: Tensor) -> Tensor:
    """At least fp32: gates and norms are not left to half precision."""
    return x if x.dtype == torch.float64 else x.float()
