"""The fused norm as a custom operator of PyTorch. All norms are cases of it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native.pages import blank_like
from ..native.pointwise import refuse_double_backward, run


@torch.library.custom_op("trellis::norm", mutates_args=(), device_types="cpu")
def norm(x: Tensor, weight: Tensor | None, gate: Tensor | None, share: float, eps: float) -> Tensor:
    """y = x / sqrt(share |x|^2 + eps) * weight * GELU(gate), over the last dimension."""
    x, weight, gate = _contiguous(x, weight, gate)
    y = blank_like(x)
    rows, size = _rows(x)
    run("norm", x, weight, gate, y, rows, size, share, eps)
    return y


@norm.register_fake
def _(x, weight, gate, share, eps):
    return x.new_empty(x.shape)


@torch.library.custom_op("trellis::norm_backward", mutates_args=(), device_types="cpu")
def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, gate: Tensor | None, share: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and gate; empty for what is None."""
    dy = dy.contiguous()
    x, weight, gate = _contiguous(x, weight, gate)
    dx, dweight, dgate = (x.new_empty(0) if t is None else blank_like(t) for t in (x, weight, gate))
    rows, size = _rows(x)
    run(
        "norm_backward", dy, x, weight, gate, dx, dweight, dgate, rows, size, share, eps
    )  # fmt: skip
    return dx, dweight, dgate


@norm_backward.register_fake
def _(dy, x, weight, gate, share, eps):
    return tuple(x.new_empty(0 if t is None else t.shape) for t in (x, weight, gate))


def _contiguous(x: Tensor, *others: Tensor | None) -> tuple:
    return x.contiguous(), *(None if t is None else t.contiguous() for t in others)


def _rows(x: Tensor) -> tuple[int, int]:
    size = x.shape[-1]
    return x.numel() // max(size, 1), size


def _setup(ctx, inputs, output):
    x, weight, gate, ctx.share, ctx.eps = inputs
    ctx.save_for_backward(x, weight, gate)


def _backward(ctx, dy):
    x, weight, gate = ctx.saved_tensors
    dx, dweight, dgate = norm_backward(dy, x, weight, gate, ctx.share, ctx.eps)
    return dx, None if weight is None else dweight, None if gate is None else dgate, None, None


norm.register_autograd(_backward, setup_context=_setup)
norm_backward.register_autograd(refuse_double_backward("norm"))
