"""The definition of one pass, token after token. Slow, any dtype; autograd does the rest.

    z = M x;  u = J_phi(z)^T (phi(z) - target);  M <- beta M - gamma u x^T;  y = M q  or  M^T q

In stale mode z is taken at the anchor, the memory at the start of the mini-batch. With
error_at="after" z is multiplied by beta: the error is that of a memory that has decayed already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import under_transform
from .activations import FUNCTIONS, PHI
from .state import anchored


def compress_reference(
    inputs: tuple[Tensor, ...],
    state: tuple[Tensor, ...],
    *,
    phi: str,
    minibatch: int,
    transposed: bool,
    error_at: str,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Sequences of equal length, everything in one dtype.

    inputs: query, x, target [N, T, H, ...], log_decay and step_size [N, T, H]. state: the memory
    [N, H, M, D], and in stale mode the anchor, like it, and the offset [N]. Returns y [N, T, H,
    ...] and the state after the last token; its offset stays that of the start.
    """
    query, x, target, log_decay, step_size = inputs
    memory, *stale = state
    tokens = zip(*(rows.unbind(1) for rows in (query, x, target, log_decay.exp(), step_size)))
    outputs = []
    for t, (query_t, x_t, target_t, decay, step) in enumerate(tokens):
        if stale:
            anchor, offset = stale
            stale = [anchored(memory, anchor, (offset + t).remainder(minibatch)), offset]
        z = _product(x_t, (stale[0] if stale else memory).mT)
        if error_at == "after":
            z = decay[..., None] * z
        write = step[..., None] * _gradient(phi, z, target_t)
        memory = decay[..., None, None] * memory
        memory = torch.addcmul(memory, write[..., None], x_t.unsqueeze(-2), value=-1)
        outputs.append(_product(query_t, memory if transposed else memory.mT))
    y = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x if transposed else target)
    return y, (memory, *stale)


def _product(vector: Tensor, matrix: Tensor) -> Tensor:
    """[N, H, a] times [N, H, a, b]"""
    return (vector.unsqueeze(-2) @ matrix).squeeze(-2)


def _gradient(phi: str, z: Tensor, target: Tensor) -> Tensor:
    """u = J_phi(z)^T (phi(z) - target).

    By autograd where u is to be differentiated in turn; else, as in decoding, by the formulas of
    activations.py, which take a fraction of the time.
    """
    if not torch.is_grad_enabled() and not under_transform():
        return PHI[phi].gradient(z, target)
    code, pull_back = torch.func.vjp(FUNCTIONS[phi], z)  # type: ignore[misc]
    return pull_back(code - target)[0]
