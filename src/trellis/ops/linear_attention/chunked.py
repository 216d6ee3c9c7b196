"""Linear attention over the chunks of a segment, and its backward. Equations in README.md.

n counts chunks x groups, c tokens. R heads share q and k: the products of these with memories are
taken for all R at once, on tensors [n, c, R * V] and memories [n, K, R * V]. Only the products
inside a chunk, whose weights differ by head, go head by head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor

from .. import fla
from ..decay import Decay, log_decay_gradient
from ..recurrence import Inputs, Recurrence, Rounds, Tensors, replaced
from .reference import linear_attention_reference

#: q, k, v, log_decay
_Given: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class LinearAttention(Recurrence):
    """inputs: q, k [.., G, K]; v [.., G, R, V]; log_decay [.., G, R] or None.
    state: the memory [N, G, R, K, V]. y: [.., G, R * V]."""

    adapter = fla.linear_attention

    def output(self, inputs: Inputs) -> tuple[int, int]:
        _, _, v, _ = cast(_Given, inputs)
        return v.shape[2], v.shape[3] * v.shape[4]

    def reference(self, inputs: Inputs, state: Tensors) -> tuple[Tensor, Tensors]:
        y, memory = linear_attention_reference(*cast(_Given, inputs), *state)
        return y, (memory,)

    def forward(self, inputs: Inputs, state: Tensors, rounds: Rounds) -> tuple[Tensor, Tensors]:
        q, k, v, decay = _unpacked(inputs)
        parts = rounds.parts(state[0].shape[1])
        written = v if decay is None else decay.end * v
        met, final = _scan(state[0], k.mT @ written.flatten(2), decay, parts)
        y = q @ torch.cat(met)
        scores = (q @ k.mT).tril()
        if decay is None:
            y = torch.baddbmm(y, scores, v.flatten(2))
        else:
            inside = _by_token(decay.within * scores[:, None] @ _by_head(v))
            y = torch.addcmul(inside, y.view_as(v), decay.start).flatten(2)
        return y, (final,)

    def backward(
        self, inputs: Inputs, state: Tensors, rounds: Rounds, dy: Tensor, dstate: Tensors
    ) -> tuple[Inputs, Tensors]:
        q, k, v, decay = _unpacked(inputs)
        dy = dy.view_as(v)
        parts = rounds.parts(state[0].shape[1])
        written, started = (v, dy) if decay is None else (decay.end * v, decay.start * dy)
        met, _ = _scan(state[0], k.mT @ written.flatten(2), decay, parts)
        left, dbefore = _scan(dstate[0], q.mT @ started.flatten(2), decay, parts[::-1])
        before, after = torch.cat(met), torch.cat(left[::-1])
        scores = (q @ k.mT).tril()
        dq = started.flatten(2) @ before.mT
        dk = written.flatten(2) @ after.mT
        dwritten = k @ after
        dlog_decay = None
        if decay is None:
            dscores = (dy.flatten(2) @ v.flatten(2).mT).tril()
            dv = torch.baddbmm(dwritten, scores.mT, dy.flatten(2)).view_as(v)
        else:
            dwritten = decay.end * dwritten.view_as(v)
            dy_by_head = _by_head(dy)
            weights = decay.within * scores[:, None]
            dv = dwritten + _by_token(weights.mT @ dy_by_head)
            dweights = dy_by_head @ _by_head(v).mT
            dscores = (dweights * decay.within).sum(1)
            # pairs[t, s] weighs the decays of s+1 .. t, starts[t] those of 1 .. t.
            pairs = dweights.mul_(weights)
            pairs[:, :, -1] += (v * dwritten).sum(-1).mT
            starts = (started * (q @ before).view_as(v)).sum(-1).mT.contiguous()
            lasting = (before * after).view(*before.shape[:2], *v.shape[2:]).sum((1, 3))
            starts[:, :, -1] += decay.whole[:, 0, :, 0] * lasting
            dlog_decay = log_decay_gradient(pairs.flatten(0, 1), starts.flatten(0, 1))
            dlog_decay = dlog_decay.view_as(starts).mT
        dq.baddbmm_(dscores, k)
        dk.baddbmm_(dscores.mT, q)
        return (dq, dk, dv, dlog_decay), (dbefore,)


class _GroupDecay:
    """The decay of R heads: weights within a chunk by head, the others as they meet v."""

    def __init__(self, log_decay: Tensor):
        """log_decay: [n, c, R]"""
        n, _, heads = log_decay.shape
        decay = Decay(log_decay.mT.flatten(0, 1))
        #: w(t, s); [n, R, c, c]
        self.within = decay.within.unflatten(0, (n, heads))
        #: from the chunk's start to token t; [n, c, R, 1]
        self.start = decay.start.view(n, heads, -1).mT[..., None].contiguous()
        #: from token s to the chunk's end; [n, c, R, 1]
        self.end = self.within[:, :, -1].mT[..., None].contiguous()
        #: of all tokens of the chunk; [n, 1, R, 1]
        self.whole = self.start[:, -1:]


def _unpacked(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, _GroupDecay | None]:
    q, k, v, log_decay = cast(_Given, inputs)
    return q, k, v, None if log_decay is None else _GroupDecay(log_decay)


def _scan(
    state: Tensor, added: Tensor, decay: _GroupDecay | None, parts: Sequence[slice]
) -> tuple[list[Tensor], Tensor]:
    """A memory [N, G, R, K, V] through chunks that scale it and add to it, [n, K, R * V].

    Overwrites `added` with the memories that the chunks leave. Returns those that they meet, part
    by part, and the last.
    """
    running = state.transpose(2, 3).flatten(0, 1).flatten(2)
    met = []
    for part in parts:
        met.append(running[: part.stop - part.start])
        left = added[part]
        if decay is None:
            left += met[-1]
        else:
            by_head = (*left.shape[:2], *state.shape[2::2])
            left.view(by_head).addcmul_(met[-1].view(by_head), decay.whole[part])
        running = replaced(running, left)
    return met, running.view(*state.shape[:2], -1, *state.shape[2::2]).transpose(2, 3)


def _by_head(x: Tensor) -> Tensor:
    """[n, c, R, V] -> [n, R, c, V]"""
    return x.transpose(1, 2).contiguous()


def _by_token(x: Tensor) -> Tensor:
    """[n, R, c, V] -> [n, c, R, V]"""
    return x.transpose(1, 2)
