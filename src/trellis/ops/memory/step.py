"""One token of one pass, for decoding without gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .activations import PHI
from .state import PassState, anchored, move_on


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
    """query, x, target [N, H, ...], gates [N, H]; in stale mode with an anchor and an offset."""
    memory, anchor, offset = state
    dtype = memory.dtype
    query, x, target = query.to(dtype), x.to(dtype), target.to(dtype)
    if anchor is not None and offset is not None:
        anchor = anchored(memory, anchor, offset)
    z = _matvec(memory if anchor is None else anchor, x)
    write = gamma.to(dtype)[..., None] * PHI[phi].gradient(z, target)
    beta = log_beta.to(dtype).exp()[..., None, None]
    memory = torch.addcmul(beta * memory, write[..., :, None], x[..., None, :], value=-1)
    y = _matvec(memory.mT if transposed else memory, query)
    if anchor is None or offset is None:
        return y, PassState(memory)
    return y, move_on(memory, anchor, offset + 1, minibatch)


def _matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]
