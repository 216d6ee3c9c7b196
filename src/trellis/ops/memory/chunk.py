"""One chunk of one pass in matrix form: the write, the read, the next memory, and their backward.

All tensors are [G, c, ...] with G = sequences x heads and c tokens; memories are [G, m, d].
w(t, s) is the product of beta over s+1 .. t. `writes` are the rows gamma_t u_t. The equations are
in README.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..decay import Decay, log_decay_gradient, lower
from .activations import Elementwise, Phi


class Written(NamedTuple):
    """What the write of a chunk leaves for its read and its backward."""

    z: Tensor  # [G, c, m]
    writes: Tensor  # gamma_t u_t, [G, c, m]
    coupling: Tensor | None  # w(t-1, s) (x_s . x_t) for s < t; exact mode only


def write_exact(
    x: Tensor, target: Tensor, gamma: Tensor, memory: Tensor, decay: Decay, phi: Phi
) -> Written:
    """Forward substitution: row t of z reads the writes of the rows before it. gamma [G, c, 1]."""
    base = decay.start_before() * (x @ memory.mT)
    coupling = lower(decay.within_before(), x @ x.mT)
    if phi.linear:
        system = gamma * coupling
        writes = torch.linalg.solve_triangular(
            system, gamma * (base - target), upper=False, unitriangular=True
        )
        return Written(base - coupling @ writes, writes, coupling)
    z, writes = torch.empty_like(base), torch.empty_like(base)
    for t in range(x.shape[1]):
        row = slice(t, t + 1)
        if t == 0:
            z_t = base[:, row]
        else:
            z_t = torch.baddbmm(base[:, row], coupling[:, row, :t], writes[:, :t], alpha=-1)
        z[:, row] = z_t
        torch.mul(phi.gradient(z_t, target[:, row]), gamma[:, row], out=writes[:, row])
    return Written(z, writes, coupling)


def write_stale(x: Tensor, target: Tensor, gamma: Tensor, anchor: Tensor, phi: Phi) -> Written:
    z = x @ anchor.mT
    return Written(z, gamma * phi.gradient(z, target), None)


def next_memory(x: Tensor, writes: Tensor, memory: Tensor, decay: Decay) -> Tensor:
    return torch.baddbmm(decay.whole * memory, (writes * decay.end).mT, x, alpha=-1)


def read(
    query: Tensor, x: Tensor, writes: Tensor, memory: Tensor, decay: Decay, transposed: bool
) -> Tensor:
    keys, values, matrix = (writes, x, memory) if transposed else (x, writes, memory.mT)
    scores = lower(decay.within, query @ keys.mT)
    return torch.baddbmm(decay.start * (query @ matrix), scores, values, alpha=-1)


class ChunkGradients(NamedTuple):
    query: Tensor
    x: Tensor
    target: Tensor
    log_beta: Tensor  # [G, c]
    gamma: Tensor  # [G, c]
    memory: Tensor
    anchor: Tensor | None  # stale mode: what flows to the anchor, not yet part of `memory`


def backward_chunk(
    query: Tensor,
    x: Tensor,
    target: Tensor,
    gamma: Tensor,
    memory: Tensor,
    anchor: Tensor | None,
    decay: Decay,
    written: Written,
    phi: Phi,
    transposed: bool,
    dy: Tensor,
    dnext: Tensor,
) -> ChunkGradients:
    """Gradients of one chunk from dy [G, c, .] and dnext [G, m, d], the next memory's gradient."""
    z, writes, coupling = written

    # The read and the next memory, as direct functions of query, x, writes and memory.
    if transposed:
        values_dot_dy = dy @ x.mT
        scores_dot = query @ writes.mT
    else:
        values_dot_dy = dy @ writes.mT
        scores_dot = query @ x.mT
    scores = lower(decay.within, scores_dot)
    inner = lower(decay.within, values_dot_dy)
    matrix = memory.mT if transposed else memory  # [G, width of y, width of query]
    dy_matrix = dy @ matrix
    dquery = decay.start * dy_matrix - inner @ (writes if transposed else x)
    from_scores, from_values = inner.mT @ query, scores.mT @ dy
    dwrites, dx = (from_scores, from_values) if transposed else (from_values, from_scores)
    x_dnext = x @ dnext.mT
    dwrites = -dwrites - decay.end * x_dnext
    dx = -dx - decay.end * (writes @ dnext)
    started = decay.start * query
    dmemory = decay.whole * dnext
    dmemory = dmemory + (started.mT @ dy if transposed else dy.mT @ started)

    # The decay: pairs[t, s] weighs the betas of s+1 .. t, starts[t] those of 1 .. t.
    pairs = -(scores * values_dot_dy)
    starts = decay.start[..., 0] * (query * dy_matrix).sum(-1)
    pairs[:, -1] -= decay.end[..., 0] * (writes * x_dnext).sum(-1)
    starts[:, -1] += decay.whole[:, 0, 0] * (dnext * memory).sum((-1, -2))

    # Through the gradient step itself, z -> writes.
    danchor = None
    if coupling is None:
        assert anchor is not None
        dz, dcode = phi.tangent(z, target, gamma * dwrites)
        danchor = dz.mT @ x
        dx = torch.baddbmm(dx, dz, anchor)
    else:
        dz, dcode, dwrites = _substitute_back(z, target, gamma, coupling, dwrites, phi)
        start_before = decay.start_before()
        started_dz = start_before * dz
        dmemory = torch.baddbmm(dmemory, started_dz.mT, x)
        dz_writes = dz @ writes.mT
        mixed = lower(decay.within_before(), dz_writes)
        dx = dx + started_dz @ memory - (mixed + mixed.mT) @ x
        # z_t sees the betas up to t - 1: one row up.
        pairs[:, :-1] -= (coupling * dz_writes)[:, 1:]
        starts[:, :-1] += (started_dz * (x @ memory.mT)).sum(-1)[:, 1:]
    dgamma = (phi.gradient(z, target) * dwrites).sum(-1)
    return ChunkGradients(
        dquery, dx, -dcode, log_decay_gradient(pairs, starts), dgamma, dmemory, danchor
    )


def _substitute_back(
    z: Tensor, target: Tensor, gamma: Tensor, coupling: Tensor, direct: Tensor, phi: Phi
) -> tuple[Tensor, Tensor, Tensor]:
    """The substitution in reverse. Returns dz, J (gamma dwrites) and the full dwrites."""
    if phi.linear:
        dwrites = torch.linalg.solve_triangular(
            (gamma * coupling).mT, direct, upper=True, unitriangular=True
        )
        dz = gamma * dwrites
        return dz, dz, dwrites
    columns = coupling.mT  # [s, t]: what row s fed into row t
    c = z.shape[1]
    dz, dwrites = torch.empty_like(z), torch.empty_like(z)
    dcode = torch.empty_like(z)
    slope = through = None
    if isinstance(phi, Elementwise):
        change, slope = phi.diagonals(z, target)
        through = gamma * change
    for t in range(c - 1, -1, -1):
        row = slice(t, t + 1)
        dwrites_t = direct[:, row]
        if t < c - 1:
            later = dz[:, t + 1 :]
            dwrites_t = torch.baddbmm(dwrites_t, columns[:, row, t + 1 :], later, alpha=-1)
        dwrites[:, row] = dwrites_t
        if through is not None:
            torch.mul(through[:, row], dwrites_t, out=dz[:, row])
        else:
            dz[:, row], dcode[:, row] = phi.tangent(
                z[:, row], target[:, row], gamma[:, row] * dwrites_t
            )
    if slope is not None:
        dcode = slope * gamma * dwrites
    return dz, dcode, dwrites
