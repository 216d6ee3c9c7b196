"""Cross-entropy of next tokens without all logits in memory at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

from ..ops.cross_entropy import IGNORED, cross_entropy_

__all__ = ["IGNORED", "next_token_loss"]


def next_token_loss(
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    chunk: int,
    count: Tensor | float | None = None,
) -> Tensor:
    """Mean cross-entropy of predicting targets[:, t] from hidden[:, t].

    hidden [B, T, dim], targets [B, T] with -100 where nothing is to be predicted. Logits are made
    for `chunk` tokens at a time: once for a plain linear head, and again in the backward for any
    other. `count` replaces the number of predicted tokens as the divisor. Without any token to
    predict the loss is NaN, as in torch.
    """
    flat = hidden.flatten(0, 1)
    targets = targets.flatten()
    predicted = targets != IGNORED
    if _is_plain_linear(head, flat):
        total = _LinearLoss.apply(flat, head.weight, targets, chunk)
    else:
        total = _recomputed_loss(flat, targets, head, chunk)
    return total / (predicted.sum() if count is None else count)


def _is_plain_linear(head: Any, hidden: Tensor) -> TypeGuard[nn.Linear]:
    """Whether head(x) is x times its weight and nothing else: no bias, wrapper or hook."""
    if type(head) is not nn.Linear or head.bias is not None or "forward" in head.__dict__:
        return False
    watched = (
        head._forward_hooks, head._forward_pre_hooks, head._backward_hooks,
        head._backward_pre_hooks, hooks._global_forward_hooks, hooks._global_forward_pre_hooks,
        hooks._global_backward_hooks, hooks._global_backward_pre_hooks,
    )  # fmt: skip
    if any(watched) or type(head.weight) not in (Tensor, nn.Parameter):
        return False
    return head.weight.dtype == hidden.dtype or torch.is_autocast_enabled(hidden.device.type)


class _LinearLoss(torch.autograd.Function):
    """The summed loss of a linear head, with the gradients taken while the logits are there.

    Nothing of the weight is kept for the backward: a sharded weight is gone by then.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        with torch.autocast(device, enabled=False):
            states, maps = (t if dtype is None else t.to(dtype) for t in (hidden, weight))
            total = hidden.new_zeros((), dtype=torch.float32)
            dhidden = torch.empty_like(hidden) if need_hidden else None
            dweight = None
            if need_weight:  # summed in fp32 over the chunks
                wide = torch.promote_types(weight.dtype, torch.float32)
                dweight = torch.zeros_like(weight, dtype=wide)
            for start in range(0, states.shape[0], chunk):
                part = slice(start, start + chunk)
                logits = F.linear(states[part], maps).float()
                gradient = need_hidden or need_weight
                total = total + cross_entropy_(logits, targets[part], gradient=gradient)
                logits = logits.to(maps.dtype)
                if dhidden is not None:
                    dhidden[part] = logits @ maps
                if dweight is not None:
                    _add_product(dweight, logits.T, states[part])
        ctx.save_for_backward(dhidden, dweight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        dhidden, dweight = ctx.saved_tensors
        if dhidden is not None:
            dhidden = dhidden * scale.to(dhidden.dtype)
        if dweight is not None:
            dweight = (dweight * scale.to(dweight.dtype)).to(ctx.weight_dtype)
        return dhidden, dweight, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _recomputed_loss(
    hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], chunk: int
) -> Tensor:
    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, hidden.shape[0], chunk):
        part = hidden[start : start + chunk], targets[start : start + chunk]
        if torch.is_grad_enabled() and hidden.shape[0] > chunk:
            total = total + checkpoint(_summed_loss, *part, head, use_reentrant=False)
        else:
            total = total + _summed_loss(*part, head)
    return total


def _summed_loss(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
    return F.cross_entropy(head(hidden).float(), targets, ignore_index=IGNORED, reduction="sum")
