"""Causal depthwise convolution with a carried tail, also over packed sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import checks
from ..native import pointwise
from .library import WIDEST
from .library import convolution as fused

ACTIVATIONS = ("identity", "silu")


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    tail: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str = "identity",
) -> tuple[Tensor, Tensor]:
    """y_t = activation(bias + sum over j of weight[:, W-1-j] * x_{t-j}), by channel.

    Args:
        x: [B, T, D], or [1, T, D] with cu_seqlens.
        weight: [D, W] with W >= 1, the newest token's weight last.
        bias: [D]; none by default.
        tail: [N, W-1, D], the W-1 inputs before each sequence, oldest first; zeros by default.
        cu_seqlens: [N+1] bounds of N packed sequences. Without it N = B.
        activation: "identity" or "silu".

    Returns:
        y like x, and the new tail [N, W-1, D].
    """
    checks.choice("activation", activation, ACTIVATIONS)
    biased = checks.present(bias=bias)
    checks.floats(x=x, weight=weight, **biased)
    checks.dimensions("x", x, "[B,T,D]")
    checks.dimensions("weight", weight, "[D,W]")
    batch, tokens, channels = x.shape
    checks.shape("weight", weight, (channels, weight.shape[1]), "[D,W]")
    if bias is not None:
        checks.shape("bias", bias, (channels,), "[D]")
    if weight.shape[1] < 1:
        raise ValueError(f"weight must be at least 1 wide; got shape {list(weight.shape)}")
    count = checks.sequences(batch, cu_seqlens, x.device)
    if cu_seqlens is not None and not torch.compiler.is_compiling():
        checks.bounds(cu_seqlens, tokens)
    reach = weight.shape[1] - 1
    if tail is None:
        tail = x.new_zeros(count, reach, channels)
    checks.floats(x=x, tail=tail)
    checks.shape("tail", tail, (count, reach, channels), "[N,W-1,D]")
    tail = tail.to(x.dtype)
    if weight.shape[1] <= WIDEST and pointwise.takes(x, weight, tail, *biased.values()):
        return fused(x, weight, bias, tail, cu_seqlens, activation == "silu")
    if cu_seqlens is None:
        padded = torch.cat([tail, x], dim=1)
        y = _convolve(padded, weight, bias, tokens)
        # A copy: the tail outlives the call and must not hold on to the whole input.
        tail = padded[:, tokens:].clone()
    else:
        y, tail = _packed(x, weight, bias, tail, cu_seqlens)
    return F.silu(y) if activation == "silu" else y, tail


def _convolve(padded: Tensor, weight: Tensor, bias: Tensor | None, tokens: int) -> Tensor:
    """Shifted products: on a CPU faster than conv1d with groups, forward and backward."""
    weight = weight.to(padded.dtype)
    y = padded[:, :tokens] * weight[:, 0]
    if bias is not None:
        y = y + bias.to(padded.dtype)
    for j in range(1, weight.shape[1]):
        y = torch.addcmul(y, padded[:, j : j + tokens], weight[:, j])
    return y


def _packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Lay each sequence out behind its own tail, convolve the row, keep the tokens' places."""
    count, reach, channels = tail.shape
    tokens = x.shape[1]
    bounds = cu_seqlens.long()
    which = torch.arange(count, device=x.device)
    owner = torch.repeat_interleave(which, bounds.diff(), output_size=tokens)
    place = torch.arange(tokens, device=x.device) + (owner + 1) * reach
    back = torch.arange(reach, device=x.device)
    tail_place = (bounds[:-1] + which * reach)[:, None] + back

    padded = x.new_empty(tokens + count * reach, channels)
    padded = padded.index_copy(0, place, x[0])
    padded = padded.index_copy(0, tail_place.flatten(), tail.flatten(0, 1))
    y = _convolve(padded[None], weight, bias, tokens + (count - 1) * reach)
    end = (bounds[1:] + (which + 1) * reach)[:, None] - reach + back
    return y.index_select(1, place - reach), padded[end]
