"""The cross-entropy of next tokens, without the logits of all tokens in memory at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

from .. import checks
from ..ops.cross_entropy import IGNORED, cross_entropy_
from ..ops.dispatch import under_transform

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
    other head. `count` divides the summed loss, in place of the number of predicted tokens. If
    there is no token to predict, the loss is NaN, as in torch.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1; got {chunk}")
    checks.dimensions("hidden", hidden, "[B,T,dim]")
    checks.shape("targets", targets, hidden.shape[:2], "[B,T]")
    flat = hidden.flatten(0, 1)
    targets = targets.flatten()
    if not _is_plain_linear(head, flat):
        total = _recomputed_loss(flat, targets, head, chunk)
    elif torch.is_grad_enabled():
        total = _LinearLoss.apply(flat, head.weight, targets, chunk)
    else:
        total, _, _ = _linear_loss(flat, head.weight, targets, chunk, (False, False))
    return total / ((targets != IGNORED).sum() if count is None else count)


def _is_plain_linear(head: Any, hidden: Tensor) -> TypeGuard[nn.Linear]:
    """Whether head(x) is x times its weight and nothing else: no bias, wrapper or hook.

    False under torch.func and in forward mode, which differentiate plain operations only.
    """
    if type(head) is not nn.Linear or head.bias is not None or "forward" in head.__dict__:
        return False
    watched = (
        head._forward_hooks, head._forward_pre_hooks, head._backward_hooks,
        head._backward_pre_hooks, hooks._global_forward_hooks, hooks._global_forward_pre_hooks,
        hooks._global_backward_hooks, hooks._global_backward_pre_hooks,
    )  # fmt: skip
    if any(watched) or type(head.weight) not in (Tensor, nn.Parameter) or under_transform():
        return False
    return head.weight.dtype == hidden.dtype or torch.is_autocast_enabled(hidden.device.type)


class _LinearLoss(torch.autograd.Function):
    """The summed loss of a linear head; the forward computes the gradients from the logits, too.

    The weight is not kept for the backward: FSDP may have freed it by then.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        total, *gradients = _linear_loss(hidden, weight, targets, chunk, ctx.needs_input_grad[:2])
        ctx.save_for_backward(*gradients)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            # In fp32: `scale` is a small number, and rounding it would shift all gradients alike.
            None if g is None else (_wide(g) * scale).to(dtype)
            for g, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        ]
        if torch.is_grad_enabled():  # create_graph=True
            scaled = [
                None if g is None else _Once.apply(g, g.new_zeros(0).requires_grad_())
                for g in scaled
            ]
        return (*scaled, None, None)


class _Once(torch.autograd.Function):
    """Passes a gradient on, and raises if it is differentiated; else it would count as constant."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, anchor: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> NoReturn:
        raise NotImplementedError(
            "the loss cannot be differentiated twice: for double backward (create_graph=True) "
            "compute it from the model's logits"
        )


def _linear_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, needed: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The summed loss, and its gradients with respect to hidden and weight if `needed`."""
    device = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:  # which autocast leaves alone
        dtype = torch.get_autocast_dtype(device)
    states, maps = hidden.to(dtype), weight.to(dtype)
    total = hidden.new_zeros((), dtype=torch.float32)
    dhidden = torch.empty_like(states) if needed[0] else None
    # The sum over the chunks is in fp32 at least.
    dweight = torch.zeros_like(_wide(maps)) if needed[1] else None
    # All chunks put their logits into the same memory: allocating it anew each time would take as
    # long as a third of the product that fills it.
    room = states.new_empty(min(chunk, states.shape[0]), maps.shape[0])
    with torch.autocast(device, enabled=False):
        for start in range(0, states.shape[0], chunk):
            part = slice(start, min(start + chunk, states.shape[0]))
            logits = torch.mm(states[part], maps.T, out=room[: part.stop - start]).float()
            total = total + cross_entropy_(logits, targets[part], gradient=any(needed))
            dlogits = logits.to(dtype)
            if dhidden is not None:
                dhidden[part] = dlogits @ maps
            if dweight is not None and dweight.dtype == dtype:
                dweight.addmm_(dlogits.T, states[part])
            elif dweight is not None:
                dweight.add_(dlogits.T @ states[part])
    return total, dhidden, dweight


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


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
