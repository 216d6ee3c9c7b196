"""The fused gate as a custom operator of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native.pages import blank_like
from ..native.pointwise import refuse_double_backward, run


@torch.library.custom_op("trellis::silu_product", mutates_args=(), device_types="cpu")
def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y = blank_like(gate)
    run("silu_product", gate, up, y, gate.numel())
    return y


@silu_product.register_fake
def _(gate, up):
    return gate.new_empty(gate.shape)


@torch.library.custom_op("trellis::silu_product_backward", mutates_args=(), device_types="cpu")
def silu_product_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dy, gate, up = dy.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = blank_like(gate), blank_like(up)
    run("silu_product_backward", dy, gate, up, dgate, dup, gate.numel())
    return dgate, dup


@silu_product_backward.register_fake
def _(dy, gate, up):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):
    return silu_product_backward(dy, *ctx.saved_tensors)


silu_product.register_autograd(_backward, setup_context=_setup)
silu_product_backward.register_autograd(refuse_double_backward("SwiGLU"))
