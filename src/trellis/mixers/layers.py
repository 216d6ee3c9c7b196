"""Small modules that several mixers share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import causal_convolution, gated_norm, rms_norm

#: Devices where what a memory reads keeps the dtype of autocast, which kernels are faster for.
HALF_ON = ("cuda",)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm over the last dimension, computed by trellis.ops.rms_norm, which may be fused."""

    def __init__(self, dim: int, eps: float):
        super().__init__(dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class GatedNorm(RMSNorm):
    """RMSNorm(x) * GELU(gate)."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        assert self.eps is not None
        return gated_norm(x, gate, self.weight, self.eps)


class ShortConvolution(nn.Module):
    """A causal depthwise convolution and an activation.

    Its state is the tail [N, width - 1, dim], the last inputs of each sequence.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        bias: bool = False,
        activation: str = "silu",
        zero_bias: bool = False,
    ):
        """zero_bias: start the bias at zero instead of drawing it uniformly like the weights."""
        super().__init__()
        self.zero_bias = zero_bias
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(dim, width))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None and self.zero_bias:
            nn.init.zeros_(self.bias)
        elif self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self, x: Tensor, tail: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return causal_convolution(
            x, self.weight, bias=self.bias, tail=tail, cu_seqlens=cu_seqlens,
            activation=self.activation,
        )  # fmt: skip

    def init_tail(self, batch: int) -> Tensor:
        return self.weight.new_zeros(batch, self.weight.shape[1] - 1, self.weight.shape[0])


class StreamConvolutions(nn.ModuleDict):
    """Short convolutions of some of a mixer's streams, such as "q", "k" and "v", by name.

    The state of a mixer holds their tails in the fields q_tail, k_tail, v_tail, ...; the tail of a
    stream without a convolution is None.
    """

    def __init__(self, sizes: Mapping[str, int], width: int, **options: Any):
        """sizes: channels of each convolved stream. options: passed to every ShortConvolution."""
        super().__init__(
            {name: ShortConvolution(size, width, **options) for name, size in sizes.items()}
        )

    def forward(
        self, streams: Mapping[str, Tensor], state: Any, cu_seqlens: Tensor | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All streams, convolved where they have a convolution, and the tails of the next state."""
        convolved, tails = dict(streams), {}
        for name, convolution in self._parts():
            tail = getattr(state, f"{name}_tail")
            convolved[name], tails[f"{name}_tail"] = convolution(streams[name], tail, cu_seqlens)
        return convolved, tails

    def init_tails(self, batch: int) -> dict[str, Tensor]:
        """The tails of `batch` sequences before their first token, by field name."""
        return {f"{name}_tail": convolution.init_tail(batch) for name, convolution in self._parts()}

    def state_size(self) -> int:
        return sum(convolution.weight[:, 1:].numel() for _, convolution in self._parts())

    def flops(self) -> int:
        """Operations per token; a multiply-add counts as two."""
        return sum(2 * convolution.weight.numel() for _, convolution in self._parts())

    def _parts(self) -> Iterable[tuple[str, ShortConvolution]]:
        return cast(Iterable[tuple[str, ShortConvolution]], self.items())


class DecayGate(nn.Module):
    """log_beta = -exp(A_log) softplus(x + dt_bias), at most 0: the gate of Mamba2.

    exp(A_log) starts uniform in the range `rate`, softplus(dt_bias) log-uniform in the range `step`
    and not below `floor`. With `half_life` both start so that the heads halve what they hold after
    so many tokens, spread evenly over the logarithm: (8, 2048) with three heads gives 8, 128 and
    2048 tokens; a single head gets 2048. Several `groups` of heads are spread alike. Neither
    parameter is subject to weight decay.
    """

    no_weight_decay = ("A_log", "dt_bias")

    def __init__(
        self,
        heads: int,
        rate: tuple[float, float],
        step: tuple[float, float],
        floor: float = 0.0,
        half_life: tuple[float, float] | None = None,
        groups: int = 1,
    ):
        super().__init__()
        self.rate, self.step, self.floor = rate, step, floor
        self.half_life, self.groups = half_life, groups
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.half_life is not None:
            self._set(torch.ones_like(self.A_log), math.log(2) / self._half_lives(*self.half_life))
            return
        low, high = self.rate
        rates = torch.empty(self.A_log.shape, device=self.A_log.device).uniform_(low, high)
        low, high = (math.log(bound) for bound in self.step)
        self._set(rates, torch.empty_like(rates).uniform_(low, high).exp().clamp(min=self.floor))

    def _half_lives(self, shortest: float, longest: float) -> Tensor:
        heads = self.A_log.numel() // self.groups
        place = torch.linspace(0, 1, heads) if heads > 1 else torch.ones(1)
        half_lives = shortest * (longest / shortest) ** place
        return half_lives.repeat(self.groups).to(self.A_log)

    def _set(self, rates: Tensor, steps: Tensor) -> None:
        assign_(self.A_log, rates.log())
        assign_(self.dt_bias, steps + torch.log(-torch.expm1(-steps)))  # softplus's inverse

    def forward(self, x: Tensor) -> Tensor:
        return self.log_decay(self.steps(x))

    def steps(self, x: Tensor) -> Tensor:
        return F.softplus(wide(x) + wide(self.dt_bias))

    def log_decay(self, steps: Tensor) -> Tensor:
        return -wide(self.A_log).exp() * steps


def rotated(
    q: Tensor, k: Tensor, place: Tensor, theta: float, scaling: Mapping[str, float] | None = None
) -> tuple[Tensor, Tensor]:
    """q and k with rotary positions.

    place: the position of every token; it broadcasts to the shape of q and k without the channels.
    scaling: Llama 3's, by the names that `TransformerMixerConfig.rope_scaling` has.
    """
    # fp32 would round the angle of the millionth token by a thousandth; mps has no fp64.
    exact = torch.float32 if place.device.type == "mps" else torch.float64
    size = q.shape[-1]
    exponents = torch.arange(0, size, 2, device=place.device).to(exact) / size
    frequencies = theta**-exponents
    if scaling is not None:
        frequencies = _stretched(frequencies, scaling)
    angles = place[..., None].to(exact) * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    cosine, sine = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    return _rotate(q, cosine, sine), _rotate(k, cosine, sine)


def _stretched(frequencies: Tensor, scaling: Mapping[str, float]) -> Tensor:
    """Llama 3's scaling: slow turns are slowed down by `factor`, fast ones stay as they are.

    Slow turns are those with fewer than low_freq_factor periods in the original context, fast ones
    those with more than high_freq_factor; between them the two are mixed.
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    periods = frequencies * scaling["original_max_position_embeddings"] / (2 * math.pi)
    kept = ((periods - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling["factor"])


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn pairs of channels by their angles; channel i is paired with i + D/2, as in Llama."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine


def places(before: Tensor, tokens: int, cu_seqlens: Tensor | None) -> Tensor:
    """The position of every token, [B, T], counted on from the `before` [N] tokens already read."""
    row = torch.arange(tokens, device=before.device)
    if cu_seqlens is None:
        return before[:, None] + row
    bounds = cu_seqlens.long()
    first = (before - bounds[:-1]).repeat_interleave(bounds.diff(), output_size=tokens)
    return (first + row)[None]


def assign_(parameter: Tensor, value: Tensor) -> None:
    """Fill a parameter, unless transformers has marked it as already loaded from a checkpoint."""
    if not getattr(parameter, "_is_hf_initialized", False):
        parameter.copy_(value)


def wide(x: Tensor) -> Tensor:
    """x in fp32, or as it is in fp64: gates and norms are never computed in half precision."""
    return x if x.dtype == torch.float64 else x.float()


def as_projected(x: Tensor, projected: Tensor) -> Tensor:
    """x, computed from `projected` in fp32: on a GPU in the dtype of that, elsewhere as it is."""
    return x.to(projected.dtype) if projected.device.type in HALF_ON else x


def sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """How many sequences x [B, T, dim] holds."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def plain(weight: Tensor) -> Tensor:
    """A map's weight; in maps that torch's quantize_dynamic has replaced it is a function."""
    return weight().dequantize() if callable(weight) else weight


def blank_state(weight: Tensor, *shape: int) -> Tensor:
    """Zeros for a state on the device of a mixer's weight, in fp32, or fp64 if the weight is."""
    weight = plain(weight)
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return torch.zeros(shape, dtype=dtype, device=weight.device)
