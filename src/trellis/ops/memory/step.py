"""One token of one pass, for decoding. Plain differentiable PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .activations import PHI
from .state import PassState


def compress_token(
    query: Tensor,
    x: Tensor,
    target: Tensor,
    log_beta: Tensor,
    gamma: Tensor,
    state: PassState,
    *,
    phi: str,
    minibatch: int,
    transposed: bool,
) -> tuple[Tensor, PassState]:
    """query, x, target [N, H, ...], gates [N, H]. minibatch = 1 is exact mode."""
    memory, anchor, offset = state
    dtype = memory.dtype
    query, x, target = query.to(dtype), x.to(dtype), target.to(dtype)
    if minibatch > 1:
        anchor = torch.where((offset == 0)[:, None, None, None], memory, anchor)
    z = _matvec(memory if minibatch == 1 else anchor, x)
    write = gamma.to(dtype)[..., None] * PHI[phi].gradient(z, target)
    beta = log_beta.to(dtype).exp()[..., None, None]
    memory = torch.addcmul(beta * memory, write[..., :, None], x[..., None, :], value=-1)
    y = _matvec(memory.mT if transposed else memory, query)
    if minibatch == 1:
        return y, PassState(memory)
    offset = (offset + 1) % minibatch
    anchor = torch.where((offset == 0)[:, None, None, None], memory, anchor)
    return y, PassState(memory, anchor, offset)


def _matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]
