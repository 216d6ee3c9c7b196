"""The definition of one pass, token after token. Slow, any dtype; autograd does the rest.

    z = M x;  u = J_phi(z)^T (phi(z) - target);  M <- beta M - gamma u x^T;  y = M q  or  M^T q

In stale mode z is taken at the anchor, the memory at the start of the mini-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activations import FUNCTIONS
from .state import PassState, anchored, move_on


def compress_reference(
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
    """Equal-length sequences: query, x, target [N, T, H, ...], gates [N, T, H].

    In stale mode the state has an anchor and an offset. Returns y in the state's dtype.
    """
    memory, anchor, offset = state
    dtype = memory.dtype
    outputs = []
    for t in range(x.shape[1]):
        x_t, target_t, query_t = x[:, t].to(dtype), target[:, t].to(dtype), query[:, t].to(dtype)
        beta_t, gamma_t = log_beta[:, t].to(dtype).exp(), gamma[:, t].to(dtype)
        gradient_at = memory
        if anchor is not None and offset is not None:
            gradient_at = anchor = anchored(memory, anchor, (offset + t).remainder(minibatch))

        z = torch.einsum("nhmd,nhd->nhm", gradient_at, x_t)
        code, pull_back = torch.func.vjp(FUNCTIONS[phi], z)  # type: ignore[misc]
        (u,) = pull_back(code - target_t)
        write = torch.einsum("nh,nhm,nhd->nhmd", gamma_t, u, x_t)
        memory = beta_t[..., None, None] * memory - write

        read = "nhmd,nhm->nhd" if transposed else "nhmd,nhd->nhm"
        outputs.append(torch.einsum(read, memory, query_t))

    if outputs:
        y = torch.stack(outputs, dim=1)
    else:
        y = query.new_zeros(
            *query.shape[:3], memory.shape[3 if transposed else 2], dtype=memory.dtype
        )
    if anchor is None or offset is None:
        return y, PassState(memory)
    return y, move_on(memory, anchor, offset + x.shape[1], minibatch)
