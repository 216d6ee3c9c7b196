"""Cross-entropy together with its gradient, in the memory of the logits.

    loss_r      = log sum over i of exp(z_ri) - z_r,target        0 where the target is -100
    dloss_r/dz  = softmax(z_r) - onehot(target)                   0 where the target is -100

The gradient is known with the loss, so both are computed at once and the gradient overwrites the
logits: a chunk of logits is made once and never copied. Exponentials are taken of differences to
the largest logit of the row.

`cross_entropy_reference` defines both in plain PyTorch. Large fp32 tensors on the CPU go through a
fused kernel (native/pointwise.cpp). On a GPU that of liger-kernel computes loss and gradient, where
it is installed: two passes over the logits instead of about eight.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from .dispatch import asked_backend
from .native import pointwise

#: The target of rows without a loss, as in torch.
IGNORED = -100
#: Devices on which liger-kernel is used.
LIGER_ON = ("cuda",)


def cross_entropy_reference(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """The cross-entropy of every row [R], and the gradient of their sum [R, n]."""
    losses = F.cross_entropy(logits, targets, ignore_index=ignored, reduction="none")
    skipped = (targets == ignored)[:, None]
    taken = F.one_hot(targets.masked_fill(skipped[:, 0], 0), logits.shape[1])
    return losses, (logits.softmax(-1) - taken).masked_fill(skipped, 0.0)


@torch.no_grad()
def cross_entropy_(logits: Tensor, targets: Tensor, *, gradient: bool) -> Tensor:
    """The sum of -log softmax(logits)[target] over the rows, in fp32.

    Autograd does not see this function: with `gradient`, the caller finds the gradient in `logits`.

    Args:
        logits: [R, n], fp32 or fp64. With `gradient` the gradient of the sum overwrites them.
        targets: [R], int64, from 0 to n - 1, or IGNORED for a row without loss and gradient.
    """
    checks.dimensions("logits", logits, "[R,n]")
    checks.shape("targets", targets, logits.shape[:1], "[R]")
    if logits.is_contiguous() and targets.dtype == torch.int64 and pointwise.takes(logits):
        return fused_cross_entropy_(logits, targets, gradient, IGNORED).sum()
    if gradient and _liger_takes(logits):
        return _by_liger_(logits, targets)
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").float()
    if gradient:
        skipped = (targets == IGNORED)[:, None]
        logits.sub_(logits.amax(-1, keepdim=True)).exp_()
        logits.div_(logits.sum(-1, keepdim=True))
        taken = targets[:, None].masked_fill(skipped, 0)
        logits.scatter_add_(1, taken, torch.full_like(taken, -1, dtype=logits.dtype))
        logits.masked_fill_(skipped, 0.0)  # also where an ignored row is not finite
    return loss


def _liger_takes(logits: Tensor) -> bool:
    return (
        logits.device.type in LIGER_ON
        and logits.dtype == torch.float32
        and logits.is_contiguous()
        and logits.numel() > 0
        and asked_backend() == "auto"
        and not torch.compiler.is_compiling()
        and liger() is not None
    )


@functools.cache
def liger() -> Callable[..., Tensor] | None:
    """liger-kernel's cross-entropy, imported at its first use; None if it is not installed."""
    try:
        module = importlib.import_module("liger_kernel.transformers.functional")
    except ImportError:
        return None
    return module.liger_cross_entropy


def _by_liger_(logits: Tensor, targets: Tensor) -> Tensor:
    """With the gradient only: also without it, liger-kernel overwrites rows that are ignored."""
    function = liger()
    assert function is not None
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        loss = function(leaf, targets, ignore_index=IGNORED, reduction="sum")
    (found,) = torch.autograd.grad(loss, leaf)
    if found.data_ptr() != logits.data_ptr():  # it is, so far: computed in place
        logits.copy_(found)
    return loss.detach()


@torch.library.custom_op("trellis::cross_entropy_", mutates_args=("logits",), device_types="cpu")
def fused_cross_entropy_(logits: Tensor, targets: Tensor, gradient: bool, ignored: int) -> Tensor:
    """The cross-entropy of every row, by the kernel; with `gradient` it overwrites the logits."""
    rows, classes = logits.shape
    wrong = (targets != ignored) & ((targets < 0) | (targets >= classes))
    if wrong.any():
        raise IndexError(
            f"targets must be from 0 to {classes - 1}, or {ignored}; got {targets[wrong][0]}"
        )
    losses = logits.new_empty(rows)
    outputs = (logits, losses)
    pointwise.run("cross_entropy", (targets,), outputs, rows, classes, ignored, int(gradient))
    return losses


@fused_cross_entropy_.register_fake
def _(logits, targets, gradient, ignored):
    return logits.new_empty(logits.shape[0])
