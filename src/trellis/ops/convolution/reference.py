"""The definition of the causal depthwise convolution, token after token."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_convolution_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor
) -> tuple[Tensor, Tensor]:
    """x [N, T, D], weight [D, W], bias [D], tail [N, W-1, D]: what is before x, oldest first."""
    window = tail
    outputs = []
    for t in range(x.shape[1]):
        window = torch.cat([window, x[:, t : t + 1]], dim=1)  # [N, W, D]
        outputs.append((window * weight.T).sum(1))
        window = window[:, 1:]
    y = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x)
    return y if bias is None else y + bias, window
