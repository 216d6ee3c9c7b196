"""The gated slot memory, in chunks. The matrix form is in README.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import fla
from ..recurrence import Inputs, Recurrence, Rounds, Tensors, replaced
from .reference import gated_slots_reference
from .weights import LEAF, Constant, Decaying, Pass


class _Chunks(NamedTuple):
    """What both passes have computed for every chunk; memories are those at its start."""

    q: Tensor  # scaled
    k: Tensor
    v: Tensor
    weights: Constant
    written: Tensor  # to the chunk's end
    keys: Tensor
    values: Tensor
    final: Tensors
    scores: Tensor
    key_read: Tensor
    key_parts: list[Tensor]
    r: Tensor


@dataclass(frozen=True)
class GatedSlots(Recurrence):
    """Inputs q, k, v, write, log_decay (None: no decay); state keys, values."""

    scale: float

    adapter = fla.gated_slots

    def output(self, inputs: Inputs) -> tuple[int, int]:
        _, _, v, _ = _given(inputs)
        return v.shape[2], v.shape[3]

    def reference(self, inputs: Inputs, state: Tensors) -> tuple[Tensor, Tensors]:
        q, k, v, write = _given(inputs)
        keys, values = state
        y, *final = gated_slots_reference(q, k, v, write, inputs[4], keys, values, self.scale)
        return y, tuple(final)

    def forward(self, inputs: Inputs, state: Tensors, rounds: Rounds) -> tuple[Tensor, Tensors]:
        c = self._passes(inputs, state, rounds)
        y = c.weights.contract(c.r) @ c.v
        y.baddbmm_(c.weights.from_start(c.r), c.values)
        return _cut(y, inputs), c.final

    def backward(
        self, inputs: Inputs, state: Tensors, rounds: Rounds, dy: Tensor, dstate: Tensors
    ) -> tuple[Inputs, Tensors]:
        c = self._passes(inputs, state, rounds)
        w = c.weights
        dy = _padded(dy)
        back = rounds.parts(dstate[0].shape[1])[::-1]
        # Value pass.
        dmixed = dy @ c.v.mT
        dr, value_parts = w.spread(dmixed)
        value_read = w.from_start(dy @ c.values.mT)
        dr += value_read
        dvalues, dvalues_start = _chain(w, w.from_start(c.r).mT @ dy, dstate[1], back)
        dv = (w.contract(c.r).mT @ dy).baddbmm_(c.written, dvalues)
        # Softmax and key pass.
        dyhat = dr.sub_((c.r * dr).sum(2, keepdim=True)).mul_(c.r)
        decayed = w.from_start(dyhat)
        dkeys, dkeys_start = _chain(w, decayed.mT @ c.q, dstate[0], back)
        dscores = w.contract(dyhat)
        dq = (dscores @ c.k).baddbmm_(decayed, c.keys).mul_(self.scale)
        dk = (dscores.mT @ c.q).baddbmm_(c.written, dkeys)
        # What both passes share.
        dwrite, dlog_decay = w.gradients(
            [
                Pass(dyhat, c.key_read, c.scores, c.key_parts),
                Pass(c.r, value_read, dmixed, value_parts),
            ],
            (c.k @ dkeys.mT).baddbmm_(c.v, dvalues.mT),
            [(c.keys, dkeys), (c.values, dvalues)],
        )
        found = (dq, dk, dv, dwrite, dlog_decay)
        return tuple(None if d is None else _cut(d, inputs) for d in found), (
            dkeys_start,
            dvalues_start,
        )

    def _passes(self, inputs: Inputs, state: Tensors, rounds: Rounds) -> _Chunks:
        q, k, v, write = map(_padded, _given(inputs))
        q = q * self.scale
        log_decay = inputs[4]
        w = Constant(write) if log_decay is None else Decaying(write, _padded(log_decay))
        written = w.to_end(write)
        parts = rounds.parts(state[0].shape[1])
        keys, final_keys = _chain(w, written.mT @ k, state[0], parts)
        values, final_values = _chain(w, written.mT @ v, state[1], parts)
        scores = q @ k.mT
        yhat, key_parts = w.spread(scores)
        read = w.from_start(q @ keys.mT)
        r = yhat.add_(read).softmax(2)
        final = (final_keys, final_values)
        return _Chunks(q, k, v, w, written, keys, values, final, scores, read, key_parts, r)


def _chain(w: Constant, added: Tensor, state: Tensor, parts: list[slice]) -> tuple[Tensor, Tensor]:
    """The state [n, H, M, D] before each of the chunks, which all decay it and add [G, M, D] to it.

    Returns these states [G, M, D], and the last. In reverse order it chains gradients.
    """
    running, before = state.flatten(0, 1), torch.empty_like(added)
    for part in parts:
        reached = running[: part.stop - part.start]
        before[part] = reached
        running = replaced(running, w.next(reached, added[part], part))
    return before, running.view_as(state)


def _given(inputs: Inputs) -> Tensors:
    """q, k, v and write; only log_decay may be None."""
    return cast(Tensors, inputs[:4])


def _padded(x: Tensor) -> Tensor:
    """Up to a length that can be halved: tokens that write nothing and decay nothing."""
    tokens = x.shape[1]
    length = LEAF
    while length < tokens:
        length *= 2
    return x.contiguous() if length == tokens else F.pad(x, (0, 0, 0, length - tokens))


def _cut(x: Tensor, inputs: Inputs) -> Tensor:
    return x[:, : _given(inputs)[0].shape[1]]
