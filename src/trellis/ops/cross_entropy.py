"""Cross-entropy together with its gradient, in the memory of the logits.

    loss_r      = log sum over i of exp(z_ri) - z_r,target        0 where the target is -100
    dloss_r/dz  = softmax(z_r) - onehot(target)                   0 where the target is -100

The gradient is known with the loss, so both are computed at once and the gradient overwrites the
logits: a chunk of logits is made once and never copied. Exponentials are taken of differences to
the largest logit of the row.

`cross_entropy_reference` defines both in plain PyTorch. Large fp32 tensors on the CPU go through a
fused kernel (native/pointwise.cpp).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from .native import pointwise

#: The target of rows without a loss, as in torch.
IGNORED = -100


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
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").float()
    if gradient:
        skipped = (targets == IGNORED)[:, None]
        logits.sub_(logits.amax(-1, keepdim=True)).exp_()
        logits.div_(logits.sum(-1, keepdim=True))
        taken = targets[:, None].masked_fill(skipped, 0)
        logits.scatter_add_(1, taken, torch.full_like(taken, -1, dtype=logits.dtype))
        logits.masked_fill_(skipped, 0.0)  # also where an ignored row is not finite
    return loss


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
