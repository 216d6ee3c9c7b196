"""Cross-entropy with its gradient at once, in the memory of the logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import checks
from ..native import pointwise
from .library import cross_entropy_ as fused

#: The target of rows without a loss, as in torch.
IGNORED = -100


@torch.no_grad()
def cross_entropy_(logits: Tensor, targets: Tensor, *, gradient: bool) -> Tensor:
    """The sum of -log softmax(logits)[target] over the rows, in fp32.

    Args:
        logits: [R, n], fp32 or fp64. With `gradient` they become the gradient of the sum.
        targets: [R], int64, from 0 to n - 1, or IGNORED: no loss and no gradient.

    Not seen by autograd: who wants the gradient takes it from here.
    """
    checks.dimensions("logits", logits, "[R,n]")
    checks.shape("targets", targets, logits.shape[:1], "[R]")
    if logits.is_contiguous() and targets.dtype == torch.int64 and pointwise.takes(logits):
        return fused(logits, targets, gradient, IGNORED).sum()
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").float()
    if gradient:
        skipped = (targets == IGNORED)[:, None]
        logits.sub_(logits.amax(-1, keepdim=True)).exp_()
        logits.div_(logits.sum(-1, keepdim=True))
        taken = targets[:, None].masked_fill(skipped, 0)
        logits.scatter_add_(1, taken, torch.full_like(taken, -1, dtype=logits.dtype))
        logits.masked_fill_(skipped, 0.0)  # also where an ignored row is not finite
    return loss
