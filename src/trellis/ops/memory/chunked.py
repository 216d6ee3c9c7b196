"""One pass over whole sequences, chunk by chunk, with the backward written by hand.

Kept for the backward: the inputs and the memory at every SEGMENT-th chunk start. Between two of
these the memories are computed again, so memory is not one graph node per token.

minibatch = 1 is exact mode, where the chunk is free to choose; in stale mode the chunk is the
mini-batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from ... import checks
from ..layout import ChunkLayout, ChunkRows
from . import chunk as one
from .activations import PHI

#: Tokens per chunk in exact mode, and tokens between two saved memories.
EXACT_CHUNK = 32
SEGMENT_TOKENS = 256


def chunk_size(minibatch: int) -> int:
    return EXACT_CHUNK if minibatch == 1 else minibatch


def segment_chunks(minibatch: int) -> int:
    """Chunks between two saved memories."""
    return max(1, SEGMENT_TOKENS // chunk_size(minibatch))


def saved_bound(tokens: int, sequences: int, minibatch: int) -> int:
    """A bound on the saved memories that depends on shapes alone, as tracing needs it."""
    return tokens // (chunk_size(minibatch) * segment_chunks(minibatch)) + 2 * sequences + 1


class _Inputs:
    """The inputs of a pass on one flat token axis, [tokens, H, ...]."""

    def __init__(
        self,
        query: Tensor,
        x: Tensor,
        target: Tensor,
        log_beta: Tensor,
        gamma: Tensor,
        memory: Tensor,
        offset: Tensor | None,
        cu_seqlens: Tensor | None,
        minibatch: int,
    ):
        self.given = (query, x, target, log_beta, gamma)
        self.flat = tuple(tensor.flatten(0, 1) for tensor in self.given)
        self.dtype = memory.dtype
        self.heads = memory.shape[1]
        self.layout = ChunkLayout.of(
            x.shape[0], x.shape[1], cu_seqlens, chunk_size(minibatch), memory.device,
            None if offset is None else checks.offsets(offset, minibatch),
        )  # fmt: skip

    def chunk(self, i: int) -> tuple[ChunkRows, tuple[Tensor, ...]]:
        """Rows of chunk i and (query, x, target, log_beta, gamma) there; gamma is [G, c, 1]."""
        rows = self.layout.chunk_rows(i)
        query, x, target, log_beta, gamma = (rows.take(flat, self.dtype) for flat in self.flat)
        return rows, (query, x, target, log_beta, gamma[..., None])

    def sorted(self, state: Tensor) -> Tensor:
        """[N, H, m, d] -> a new [N * H, m, d] in the layout's order."""
        return self.layout.sort(state).flatten(0, 1)

    def unsorted(self, state: Tensor) -> Tensor:
        return self.layout.unsort(state.unflatten(0, (-1, self.heads)))


class Forward(NamedTuple):
    y: Tensor  # in the memory's dtype
    memory: Tensor
    anchor: Tensor  # stale mode: the anchor of the last chunk; exact mode: empty
    saved: Tensor  # memories at segment starts, if asked for; else empty


def forward(
    query: Tensor,
    x: Tensor,
    target: Tensor,
    log_beta: Tensor,
    gamma: Tensor,
    memory: Tensor,
    anchor: Tensor | None,
    offset: Tensor | None,
    cu_seqlens: Tensor | None,
    phi: str,
    minibatch: int,
    transposed: bool,
    save: bool,
) -> Forward:
    """Shapes as in `compress`. `anchor` is the first chunk's anchor (stale mode only)."""
    inputs = _Inputs(query, x, target, log_beta, gamma, memory, offset, cu_seqlens, minibatch)
    layout, heads = inputs.layout, inputs.heads
    y = x.new_empty(
        inputs.flat[0].shape[0], heads, memory.shape[3 if transposed else 2], dtype=memory.dtype
    )
    saved = blank_saved(memory, x, minibatch) if save else memory.new_empty(0)
    every, used = segment_chunks(minibatch), 0

    state = inputs.sorted(memory)
    anchors = inputs.sorted(anchor) if anchor is not None else None
    for i in range(layout.chunks):
        groups = layout.active(i) * heads
        before = state[:groups]
        if save and i % every == 0:
            saved[used : used + groups] = before
            used += groups
        rows, (q, x_i, target_i, log_beta_i, gamma_i) = inputs.chunk(i)
        decay = one.Decay(log_beta_i)
        if anchors is None:
            written = one.write_exact(x_i, target_i, gamma_i, before, decay, PHI[phi])
        else:
            if i > 0:
                anchors[:groups] = before
            written = one.write_stale(x_i, target_i, gamma_i, anchors[:groups], PHI[phi])
        x_i, writes, broken = _contain(x_i, written.writes)
        read = one.read(q, x_i, writes, before, decay, transposed)
        rows.put(y, read.masked_fill(broken, math.nan))
        after = one.next_memory(x_i, writes, before, decay)
        state[:groups] = after.masked_fill(broken[:, -1:], math.nan)
    return Forward(
        y.view(*x.shape[:3], y.shape[-1]),
        inputs.unsorted(state),
        memory.new_empty(0) if anchors is None else inputs.unsorted(anchors),
        saved,
    )


def _contain(x: Tensor, writes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keep a non-finite write out of the rows before it.

    The matrix products multiply later rows by zero, and zero times infinity is NaN. From the
    first non-finite write on, a head's output and memory are NaN.
    """
    finite = ((writes * 0).sum(-1, keepdim=True) + (x * 0).sum(-1, keepdim=True)) == 0
    broken = (~finite).cumsum(1) > 0
    return x.masked_fill(broken, 0), writes.masked_fill(broken, 0), broken


def blank_saved(memory: Tensor, x: Tensor, minibatch: int) -> Tensor:
    sequences, heads = memory.shape[:2]
    bound = saved_bound(x.shape[0] * x.shape[1], sequences, minibatch)
    return memory.new_zeros(bound * heads, *memory.shape[2:])


class Backward(NamedTuple):
    query: Tensor
    x: Tensor
    target: Tensor
    log_beta: Tensor
    gamma: Tensor
    memory: Tensor
    anchor: Tensor  # empty in exact mode


def backward(
    dy: Tensor,
    dmemory: Tensor,
    danchor: Tensor | None,
    query: Tensor,
    x: Tensor,
    target: Tensor,
    log_beta: Tensor,
    gamma: Tensor,
    memory: Tensor,
    anchor: Tensor | None,
    offset: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    phi: str,
    minibatch: int,
    transposed: bool,
) -> Backward:
    """Gradients of `forward`'s y, memory and anchor with respect to its tensor inputs."""
    inputs = _Inputs(query, x, target, log_beta, gamma, memory, offset, cu_seqlens, minibatch)
    layout, heads = inputs.layout, inputs.heads
    grads = tuple(flat.new_empty(flat.shape) for flat in inputs.flat)
    dy = dy.flatten(0, 1)
    dstate = inputs.sorted(dmemory)
    first_anchor = inputs.sorted(anchor) if anchor is not None else None
    danchors = inputs.sorted(danchor) if danchor is not None else None

    every = segment_chunks(minibatch)
    starts = list(range(0, layout.chunks, every))
    used = sum(layout.active(i) for i in starts) * heads
    for start in reversed(starts):
        groups = layout.active(start) * heads
        used -= groups
        state = saved[used : used + groups]
        stop = min(start + every, layout.chunks)
        segment = []
        for i in range(start, stop):
            segment.append(_rewrite(inputs, i, state, first_anchor, phi))
            if i + 1 < stop:
                following = layout.active(i + 1) * heads
                _, taken, decay, written, _ = segment[-1]
                after = one.next_memory(taken[1], written.writes, state[: len(written.z)], decay)
                state = after[:following]
        for i in range(stop - 1, start - 1, -1):
            rows, (q, x_i, target_i, _, gamma_i), decay, written, before = segment.pop()
            active = slice(0, layout.active(i) * heads)
            ended = slice(layout.active(i + 1) * heads, layout.active(i) * heads)
            at = None if first_anchor is None else (first_anchor[active] if i == 0 else before)
            grad = one.backward_chunk(
                q, x_i, target_i, gamma_i, before, at, decay, written, PHI[phi], transposed,
                rows.take(dy, inputs.dtype), dstate[active],
            )  # fmt: skip
            for flat, value in zip(grads, grad[:5]):
                rows.put(flat, value)
            dstate[active] = grad.memory
            if danchors is None or grad.anchor is None:
                continue
            if i > 0:  # the anchor of chunk i is the memory before it
                dstate[active] += grad.anchor
                dstate[ended] += danchors[ended]
                danchors[ended] = 0
            else:
                danchors[active] += grad.anchor
    dquery, dx, dtarget, dlog_beta, dgamma = (
        grad.view(given.shape) for grad, given in zip(grads, inputs.given)
    )
    danchor = memory.new_empty(0) if danchors is None else inputs.unsorted(danchors)
    return Backward(dquery, dx, dtarget, dlog_beta, dgamma, inputs.unsorted(dstate), danchor)


def _rewrite(
    inputs: _Inputs, i: int, state: Tensor, first_anchor: Tensor | None, phi: str
) -> tuple[ChunkRows, tuple[Tensor, ...], one.Decay, one.Written, Tensor]:
    """The write of chunk i once more, from the memory before it."""
    rows, taken = inputs.chunk(i)
    _, x, target, log_beta, gamma = taken
    decay = one.Decay(log_beta)
    if first_anchor is None:
        written = one.write_exact(x, target, gamma, state, decay, PHI[phi])
    else:
        at = first_anchor[: len(state)] if i == 0 else state
        written = one.write_stale(x, target, gamma, at, PHI[phi])
    return rows, taken, decay, written, state
