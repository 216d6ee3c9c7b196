"""The chunked pass as custom operators, so that autograd and torch.compile see one node."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import no_autocast
from . import chunked


@torch.library.custom_op("trellis::compress", mutates_args=())
def compress(
    query: Tensor,
    x: Tensor,
    target: Tensor,
    log_beta: Tensor,
    gamma: Tensor,
    memory: Tensor,
    anchor: Tensor | None,
    offset: Tensor | None,
    cu_seqlens: Tensor | None,
    phi: str,
    minibatch: int,
    transposed: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with no_autocast(query.device):
        out = chunked.forward(
            query, x, target, log_beta, gamma, memory, anchor, offset, cu_seqlens,
            phi, minibatch, transposed, save,
        )  # fmt: skip
    return out.y, out.memory, out.anchor, out.saved


@compress.register_fake
def _(
    query, x, target, log_beta, gamma, memory, anchor, offset, cu_seqlens,
    phi, minibatch, transposed, save,
):  # fmt: skip
    saved = chunked.blank_saved(memory, x, minibatch) if save else memory.new_empty(0)
    width = memory.shape[3 if transposed else 2]
    return (
        x.new_empty(*x.shape[:3], width, dtype=memory.dtype),
        memory.new_empty(memory.shape),
        memory.new_empty(0 if anchor is None else anchor.shape),
        saved,
    )


@torch.library.custom_op("trellis::compress_backward", mutates_args=())
def compress_backward(
    dy: Tensor,
    dmemory: Tensor,
    danchor: Tensor | None,
    query: Tensor,
    x: Tensor,
    target: Tensor,
    log_beta: Tensor,
    gamma: Tensor,
    memory: Tensor,
    anchor: Tensor | None,
    offset: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    phi: str,
    minibatch: int,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with no_autocast(query.device):
        grad = chunked.backward(
            dy, dmemory, danchor, query, x, target, log_beta, gamma, memory, anchor, offset,
            cu_seqlens, saved, phi, minibatch, transposed,
        )  # fmt: skip
    return (
        grad.query, grad.x, grad.target, grad.log_beta, grad.gamma, grad.memory, grad.anchor,
    )  # fmt: skip


@compress_backward.register_fake
def _(
    dy, dmemory, danchor, query, x, target, log_beta, gamma, memory, anchor, offset,
    cu_seqlens, saved, phi, minibatch, transposed,
):  # fmt: skip
    anchors = memory.new_empty(0 if anchor is None else anchor.shape)
    given = (query, x, target, log_beta, gamma)
    return (*(g.new_empty(g.shape) for g in given), memory.new_empty(memory.shape), anchors)


def _setup(ctx, inputs, output):
    *tensors, phi, minibatch, transposed, save = inputs
    ctx.save_for_backward(*tensors, output[3])
    ctx.choice = (phi, minibatch, transposed)
    ctx.saved_memories = save
    ctx.mark_non_differentiable(output[3])
    ctx.set_materialize_grads(True)


def _backward(ctx, dy, dmemory, danchor, _dsaved):
    if not ctx.saved_memories:
        raise RuntimeError(
            "trellis::compress was called with save=False, so it has no backward; "
            "use trellis.ops.compress, which sets it when gradients are needed"
        )
    *tensors, saved = ctx.saved_tensors
    stale = tensors[6] is not None
    *grads, ganchor = compress_backward(
        dy.contiguous(), dmemory.contiguous(), danchor.contiguous() if stale else None,
        *tensors, saved, *ctx.choice,
    )  # fmt: skip
    # offset, cu_seqlens, phi, minibatch, transposed and save have no gradient
    return (*grads, ganchor if stale else None, *[None] * 6)


compress.register_autograd(_backward, setup_context=_setup)


def refuse_double_backward(ctx, *_):
    raise NotImplementedError(
        "the memory cannot be differentiated twice: double backward (create_graph=True) through "
        "trellis_memory and compress is not supported; use backend='reference', which is"
    )


compress_backward.register_autograd(refuse_double_backward)
