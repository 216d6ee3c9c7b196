"""The fused cross-entropy as a custom operator of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native.pointwise import run


@torch.library.custom_op("trellis::cross_entropy_", mutates_args=("logits",), device_types="cpu")
def cross_entropy_(logits: Tensor, targets: Tensor, gradient: bool, ignored: int) -> Tensor:
    """The cross-entropy of every row; with `gradient` the logits become the gradient."""
    targets = targets.contiguous()
    rows, classes = logits.shape
    wrong = (targets != ignored) & ((targets < 0) | (targets >= classes))
    if wrong.any():
        raise IndexError(
            f"targets must be from 0 to {classes - 1}, or {ignored}; got {targets[wrong][0]}"
        )
    losses = logits.new_empty(rows)
    run("cross_entropy", logits, targets, losses, rows, classes, ignored, int(gradient))
    return losses


@cross_entropy_.register_fake
def _(logits, targets, gradient, ignored):
    return logits.new_empty(logits.shape[0])
