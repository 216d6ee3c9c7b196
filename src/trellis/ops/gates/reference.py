"""The definition of the gate, in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_product_reference(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up
