"""The delta rule in chunks, forward and backward. Equations in README.md.

All tensors of a segment are [G, ...] with G = chunks x heads, c tokens per chunk. Only the states
go from chunk to chunk; what does not need them is computed for all chunks at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor

from .. import fla
from ..decay import Decay, flushed, log_decay_gradient
from ..recurrence import Inputs, Recurrence, Rounds, Tensors
from .reference import delta_rule_reference

#: q, k, v, beta, log_decay
_Given: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class DeltaRule(Recurrence):
    scale: float
    #: Half of what other recurrences take: the systems cost the square of it.
    chunk: int = 32

    adapter = fla.delta_rule

    def output(self, inputs: Inputs) -> tuple[int, int]:
        _, _, v, _, _ = cast(_Given, inputs)
        return v.shape[2], v.shape[3]

    def reference(self, inputs: Inputs, state: Tensors) -> tuple[Tensor, Tensors]:
        q, k, v, beta, log_decay = cast(_Given, inputs)
        y, final = delta_rule_reference(q, k, v, beta, log_decay, state[0], self.scale)
        return y, (final,)

    def forward(self, inputs: Inputs, state: Tensors, rounds: Rounds) -> tuple[Tensor, Tensors]:
        chunks = _Chunks(inputs, self.scale)
        before, values, final = chunks.write(state[0], rounds)
        y = (chunks.weights @ values).baddbmm_(chunks.queries_at_start, before)
        return y, (final,)

    def backward(
        self, inputs: Inputs, state: Tensors, rounds: Rounds, dy: Tensor, dstate: Tensors
    ) -> tuple[Inputs, Tensors]:
        chunks = _Chunks(inputs, self.scale)
        before, values, _ = chunks.write(state[0], rounds)
        return chunks.gradients(before, values, dy, dstate[0], rounds)


class _Chunks:
    """What the chunks of a segment are, apart from the states.

    Two kinds of rows read the memory: beta k, whose answer is subtracted from beta v, and q. They
    are stacked as `readers` [G, 2c, K]; `scores` [G, 2c, c] is what each of them finds in the
    writes of its chunk: a key in those before it, a query also in its own.
    """

    def __init__(self, inputs: Inputs, scale: float):
        q, k, v, beta, log_decay = cast(_Given, inputs)
        self.k, self.v, self.beta, self.scale = k, v, beta[..., None], scale
        self.tokens = c = k.shape[1]
        self.decay = None if log_decay is None else Decay(log_decay)
        self.readers = k.new_empty(k.shape[0], 2 * c, k.shape[2])
        torch.mul(k, self.beta, out=self.readers[:, :c])
        torch.mul(q, scale, out=self.readers[:, c:])
        self.readers_at_start, self.keys_at_end = self.readers, k
        if self.decay is not None:
            start = self.decay.start[:, None]
            self.readers_at_start = (_halves(self.readers) * start).flatten(1, 2)
            self.keys_at_end = k * self.decay.end
        self.scores = self._seen(self.readers @ k.mT)
        self.weights = self.scores[:, c:]
        self.inverse = flushed(_inverse(self.scores[:, :c]))
        self.targets = self.inverse @ (v * self.beta)
        self.reads = flushed(self.inverse @ self.readers_at_start[:, :c])

    @property
    def queries_at_start(self) -> Tensor:
        return self.readers_at_start[:, self.tokens :]

    def write(self, state: Tensor, rounds: Rounds) -> tuple[Tensor, Tensor, Tensor]:
        """The states before each chunk, the values written, and the states at the end."""
        current = state.flatten(0, 1).clone()
        before = current.new_empty(self.k.shape[0], *current.shape[1:])
        values = torch.empty_like(self.v)
        for part in rounds.parts(state.shape[1]):
            now = current[: part.stop - part.start]
            before[part] = now
            torch.baddbmm(self.targets[part], self.reads[part], now, alpha=-1, out=values[part])
            if self.decay is not None:
                now.mul_(self.decay.whole[part])
            now.baddbmm_(self.keys_at_end[part].mT, values[part])
        return before, values, current.view_as(state)

    def gradients(
        self, before: Tensor, values: Tensor, dy: Tensor, dfinal: Tensor, rounds: Rounds
    ) -> tuple[Inputs, Tensors]:
        c, k, decay = self.tokens, self.k, self.decay
        dvalues, dafter, dinitial = self._back(dy, dfinal, rounds)

        # values = (I + A)^-1 beta (v - what k reads at the chunk's start)
        dfound = dy.new_empty(dy.shape[0], 2 * c, dy.shape[2])  # by each of the readers
        dright = self.inverse.mT @ dvalues
        torch.neg(dright, out=dfound[:, :c])
        dfound[:, c:] = dy
        dscores = dfound @ values.mT
        dreaders = dfound @ before.mT
        dkeys_at_end = values @ dafter.mT
        dlog_decay = None
        if decay is not None:
            pairs = dscores[:, :c] * self.scores[:, :c]
            pairs.addcmul_(dscores[:, c:], self.scores[:, c:])
            _halves(dreaders).mul_(decay.start[:, None])
            starts = _halves((dreaders * self.readers).sum(2)).sum(1)
            dkeys_at_end *= decay.end
            pairs[:, -1] += (dkeys_at_end * k).sum(2)
            starts[:, -1:] += decay.whole[..., 0] * (dafter * before).sum((1, 2))[:, None]
            dlog_decay = log_decay_gradient(pairs, starts)

        dscores = self._seen(dscores)
        dreaders.baddbmm_(dscores, k)
        dwrites, dq = dreaders[:, :c], dreaders[:, c:]
        dk = dkeys_at_end.baddbmm_(dscores.mT, self.readers).addcmul_(self.beta, dwrites)
        dbeta = (k * dwrites).sum(2) + (self.v * dright).sum(2)
        inputs = (self.scale * dq, dk, self.beta * dright, dbeta, dlog_decay)
        return inputs, (dinitial,)

    def _back(self, dy: Tensor, dfinal: Tensor, rounds: Rounds) -> tuple[Tensor, Tensor, Tensor]:
        """From the last chunk to the first: gradients of the values, of the states after each
        chunk, and of the state before the first.
        """
        dvalues = self.weights.mT @ dy
        dread = self.queries_at_start.mT @ dy
        current = dfinal.flatten(0, 1).clone()
        dafter = torch.empty_like(dread)
        for part in reversed(rounds.parts(dfinal.shape[1])):
            now = current[: part.stop - part.start]
            dafter[part] = now
            dvalues[part].baddbmm_(self.keys_at_end[part], now)
            if self.decay is not None:
                now.mul_(self.decay.whole[part])
            now.add_(dread[part]).baddbmm_(self.reads[part].mT, dvalues[part], alpha=-1)
        return dvalues, dafter, current.view_as(dfinal)

    def _seen(self, scores: Tensor) -> Tensor:
        """In place: decayed, and zero, also for inf and NaN, where a row does not see a write."""
        if self.decay is not None:
            _halves(scores).mul_(self.decay.within[:, None])
        scores[:, : self.tokens].tril_(-1)
        scores[:, self.tokens :].tril_()
        return scores


def _halves(stacked: Tensor) -> Tensor:
    """[G, 2c, ...] -> [G, 2, c, ...]"""
    return stacked.unflatten(1, (2, -1))


def _inverse(below: Tensor) -> Tensor:
    """(I + A)^-1 for strictly lower A, row after row; the rest of `below` is not read.

    torch solves the small systems of all chunks one after the other. Solved once, for the inverse,
    they leave only matrix products, which take all chunks at once.
    """
    one = torch.eye(below.shape[1], dtype=below.dtype, device=below.device)
    return torch.linalg.solve_triangular(
        below, one.expand_as(below), upper=False, unitriangular=True
    )
