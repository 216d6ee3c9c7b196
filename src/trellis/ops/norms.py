"""Norms over the last dimension of size n, each row on its own.

    unit_length(x)             = x / sqrt(|x|^2 + 1e-6)
    rms_norm(x, w, eps)        = x / sqrt(|x|^2 / n + eps) * w
    gated_norm(x, g, w, eps)   = rms_norm(x, w, eps) * GELU(g)      GELU(g) = g P(Z < g), Z normal

All three are cases of y = s x * a with s = 1 / sqrt(share |x|^2 + eps) and a = w GELU(g), where
share is 1 or 1 / n. With h = dy * a, the gradients are

    dx = s (h - share (s x . h) s x)
    dw = sum over rows of dy GELU(g) s x
    dg = dy w GELU'(g) s x

The functions named *_reference define the norms in plain PyTorch. Large fp32 tensors on the CPU go
through one fused kernel (native/pointwise.cpp), which reads x twice and saves nothing but its
inputs for the backward. It sums over rows in blocks that depend on the shape alone, so results do
not depend on the number of threads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from .native import pointwise

#: layernorm divides by sqrt(variance + LAYERNORM_EPSILON).
LAYERNORM_EPSILON = 1e-5
#: l2norm, which is unit_length, divides by sqrt(sum of squares + L2NORM_EPSILON).
L2NORM_EPSILON = 1e-6


def unit_length_reference(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + L2NORM_EPSILON).rsqrt()


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return rms_norm_reference(x, weight, eps) * F.gelu(gate)


def unit_length(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6): the rows of x [..., n] scaled to length 1."""
    if not pointwise.takes(x):
        return unit_length_reference(x)
    return fused_norm(x, None, None, 1.0, L2NORM_EPSILON)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean of squares + eps) * weight.

    Args:
        x: [..., n].
        weight: [n], or None for ones.
    """
    _check_weight(x, weight)
    if not pointwise.takes(x, *checks.present(weight=weight).values()):
        return rms_norm_reference(x, weight, eps)
    return fused_norm(x, weight, None, 1 / x.shape[-1], eps)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """rms_norm(x, weight, eps) * GELU(gate), with the exact GELU.

    Args:
        x: [..., n].
        gate: of the shape of x.
        weight: [n], or None for ones.
    """
    checks.shape("gate", gate, x.shape, "[...,n]")
    _check_weight(x, weight)
    if not pointwise.takes(x, gate, *checks.present(weight=weight).values()):
        return gated_norm_reference(x, gate, weight, eps)
    return fused_norm(x, weight, gate, 1 / x.shape[-1], eps)


def _check_weight(x: Tensor, weight: Tensor | None) -> None:
    if weight is not None:
        checks.shape("weight", weight, x.shape[-1:], "[n]")


@torch.library.custom_op("trellis::norm", mutates_args=(), device_types="cpu")
def fused_norm(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, share: float, eps: float
) -> Tensor:
    """x / sqrt(share |x|^2 + eps) * weight * GELU(gate) over the last dimension, by the kernel."""
    (y,) = outputs = pointwise.fresh_like(x)
    pointwise.run("norm", (x, weight, gate), outputs, *_rows(x), share, eps)
    return y


@torch.library.custom_op("trellis::norm_backward", mutates_args=(), device_types="cpu")
def fused_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, gate: Tensor | None, share: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and gate; an empty tensor for a weight or gate of None."""
    dx, dweight, dgate = outputs = pointwise.fresh_like(x, weight, gate)
    pointwise.run("norm_backward", (dy, x, weight, gate), outputs, *_rows(x), share, eps)
    return dx, dweight, dgate


def _rows(x: Tensor) -> tuple[int, int]:
    """The number of rows of x and the size of each."""
    size = x.shape[-1]
    return x.numel() // max(size, 1), size


pointwise.differentiable(fused_norm, fused_norm_backward, like=(0,), graded=3)
