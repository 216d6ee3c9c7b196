"""The fused convolution as a custom operator of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from ..native.pages import blank_like
from ..native.pointwise import refuse_double_backward, run

#: The largest width that the kernel takes.
WIDEST = 16


@torch.library.custom_op("trellis::convolution", mutates_args=(), device_types="cpu")
def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    """y like x, and the new tail; the arguments are those of causal_convolution."""
    x, tail = x.contiguous(), tail.contiguous()
    y, final = blank_like(x), blank_like(tail)
    bounds = _bounds(x, cu_seqlens)
    rows, bias = weight.T.contiguous(), None if bias is None else bias.contiguous()
    run("convolution", x, rows, bias, tail, bounds, y, final, *_sizes(weight, tail), int(silu))
    return y, final


@convolution.register_fake
def _(x, weight, bias, tail, cu_seqlens, silu):
    return x.new_empty(x.shape), tail.new_empty(tail.shape)


@torch.library.custom_op("trellis::convolution_backward", mutates_args=(), device_types="cpu")
def convolution_backward(
    dy: Tensor,
    dfinal: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias (empty if there is none) and tail."""
    dy, dfinal, x, tail = (t.contiguous() for t in (dy, dfinal, x, tail))
    dx, dweight, dtail = (blank_like(t) for t in (x, weight, tail))
    dbias = x.new_empty(0 if bias is None else bias.shape)
    bounds = _bounds(x, cu_seqlens)
    rows, bias = weight.T.contiguous(), None if bias is None else bias.contiguous()
    run(
        "convolution_backward", dy, dfinal, x, rows, bias, tail, bounds, dx, dweight, dbias, dtail,
        *_sizes(weight, tail), int(silu),
    )  # fmt: skip
    return dx, dweight, dbias, dtail


@convolution_backward.register_fake
def _(dy, dfinal, x, weight, bias, tail, cu_seqlens, silu):
    return tuple(x.new_empty(0 if t is None else t.shape) for t in (x, weight, bias, tail))


def _bounds(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The first row of every sequence; a batch is a pack of equally long ones."""
    batch, tokens = x.shape[:2]
    if cu_seqlens is None:
        return torch.arange(batch + 1) * tokens
    return torch.tensor(checks.bounds(cu_seqlens, tokens))


def _sizes(weight: Tensor, tail: Tensor) -> tuple[int, int, int]:
    return tail.shape[0], weight.shape[0], weight.shape[1]


def _setup(ctx, inputs, output):
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(True)


def _backward(ctx, dy, dfinal):
    tensors = ctx.saved_tensors  # asked for once: activation checkpointing allows no more
    dx, dweight, dbias, dtail = convolution_backward(dy, dfinal, *tensors, ctx.silu)
    return dx, dweight, None if tensors[2] is None else dbias, dtail, None, None


convolution.register_autograd(_backward, setup_context=_setup)
convolution_backward.register_autograd(refuse_double_backward("convolution"))
