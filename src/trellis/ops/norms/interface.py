"""Norms over the last dimension, each row for itself."""

from __future__ import annotations

from torch import Tensor

from ... import checks
from ..memory.activations import L2NORM_EPSILON
from ..native import pointwise
from .library import norm
from .reference import gated_norm_reference, rms_norm_reference, unit_length_reference


def unit_length(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6): the memory's l2norm."""
    if not pointwise.takes(x):
        return unit_length_reference(x)
    return norm(x, None, None, 1.0, L2NORM_EPSILON)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean of squares + eps) * weight.

    Args:
        x: [..., n].
        weight: [n], or None for ones.
    """
    _check_weight(x, weight)
    if not pointwise.takes(*(t for t in (x, weight) if t is not None)):
        return rms_norm_reference(x, weight, eps)
    return norm(x, weight, None, 1 / x.shape[-1], eps)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """rms_norm(x, weight, eps) * GELU(gate), with the exact GELU.

    Args:
        x: [..., n].
        gate: like x.
        weight: [n], or None for ones.
    """
    checks.shape("gate", gate, x.shape, "[...,n]")
    _check_weight(x, weight)
    if not pointwise.takes(*(t for t in (x, gate, weight) if t is not None)):
        return gated_norm_reference(x, gate, weight, eps)
    return norm(x, weight, gate, 1 / x.shape[-1], eps)


def _check_weight(x: Tensor, weight: Tensor | None) -> None:
    if weight is not None:
        checks.shape("weight", weight, x.shape[-1:], "[n]")
