"""The gate of SwiGLU."""

from __future__ import annotations

from torch import Tensor

from ... import checks
from ..native import pointwise
from .library import silu_product as fused
from .reference import silu_product_reference


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up, for tensors of one shape."""
    checks.shape("up", up, gate.shape, "that of gate")
    if not pointwise.takes(gate, up):
        return silu_product_reference(gate, up)
    return fused(gate, up)
