"""The definitions of the norms, in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..memory.activations import l2norm


def unit_length_reference(x: Tensor) -> Tensor:
    return l2norm(x)


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return rms_norm_reference(x, weight, eps) * F.gelu(gate)
