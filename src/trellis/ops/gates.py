"""The gate of SwiGLU.

    y  = SiLU(g) u                        SiLU(g) = g s(g), s the logistic function

    dg = dy u (s + g s (1 - s))
    du = dy SiLU(g)

`silu_product_reference` defines it in plain PyTorch. Large fp32 tensors on the CPU go through a
fused kernel (native/pointwise.cpp), one pass over memory forward and one backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from .native import pointwise


def silu_product_reference(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up, for two tensors of one shape."""
    checks.shape("up", up, gate.shape, "that of gate")
    if not pointwise.takes(gate, up):
        return silu_product_reference(gate, up)
    return fused_silu_product(gate, up)


@torch.library.custom_op("trellis::silu_product", mutates_args=(), device_types="cpu")
def fused_silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up, by the kernel."""
    (y,) = outputs = pointwise.fresh_like(gate)
    pointwise.run("silu_product", (gate, up), outputs, gate.numel())
    return y


@torch.library.custom_op("trellis::silu_product_backward", mutates_args=(), device_types="cpu")
def fused_silu_product_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    dgate, dup = outputs = pointwise.fresh_like(gate, up)
    pointwise.run("silu_product_backward", (dy, gate, up), outputs, gate.numel())
    return dgate, dup


pointwise.differentiable(fused_silu_product, fused_silu_product_backward, like=(0,), graded=2)
