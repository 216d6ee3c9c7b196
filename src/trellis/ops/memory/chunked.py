"""One pass of the memory over the chunks of a segment, and its backward. Equations in README.md.

Tensors are [G, c, ...] with G = chunks x heads and c tokens per chunk; memories are [G, m, d].
w(t, s) is the product of the decays over s+1 .. t. `writes` are the rows step_size_t u_t. Only the
memories go from chunk to chunk, and in exact mode the rows of z go from token to token. What needs
neither is computed for all chunks at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from ..decay import Decay, log_decay_gradient, lower
from ..recurrence import Inputs, Recurrence, Rounds, Tensors
from .activations import PHI, Elementwise, Phi
from .reference import compress_reference

#: Tokens per chunk in exact mode, where it is free to choose.
EXACT_CHUNK = 32


@dataclass(frozen=True)
class Compression(Recurrence):
    """Inputs: query, x [.., D], target [.., M], log_decay, step_size [..]; query is [.., M] and y
    [.., D] if `transposed`, else the other way round.

    State: the memory [N, H, M, D]. In stale mode, where a chunk is a mini-batch, also the anchor,
    like it, and the offset [N]. The anchor is read by the first chunk of a sequence alone, if the
    offset is not 0: after it the anchor is the memory before the chunk.
    """

    phi: str
    transposed: bool
    error_at: str
    stale: bool
    chunk: int

    segment_tokens: ClassVar[int] = 512
    segment_least: ClassVar[int] = 256
    changing: ClassVar[int | None] = 1

    @staticmethod
    def of(phi: str, transposed: bool, error_at: str, minibatch: int) -> Compression:
        """minibatch: 1 is exact mode."""
        stale = minibatch > 1
        return Compression(phi, transposed, error_at, stale, minibatch if stale else EXACT_CHUNK)

    def output(self, inputs: Inputs) -> tuple[int, int]:
        _, x, target, _, _ = cast(Tensors, inputs)
        return x.shape[2], (x if self.transposed else target).shape[3]

    def reference(self, inputs: Inputs, state: Tensors) -> tuple[Tensor, Tensors]:
        minibatch = self.chunk if self.stale else 1
        return compress_reference(
            cast(Tensors, inputs), state,
            phi=self.phi, minibatch=minibatch, transposed=self.transposed, error_at=self.error_at,
        )  # fmt: skip

    def forward(self, inputs: Inputs, state: Tensors, rounds: Rounds) -> tuple[Tensor, Tensors]:
        chunks = _Chunks(self, inputs, state, rounds)
        swept = chunks.write()
        y = chunks.read(swept)
        final = swept.final.view_as(state[0])
        if not self.stale:
            return y, (final,)
        last = rounds.last_rows(state[0].shape[1], y.device)
        return y, (final, swept.points[last].view_as(final), state[2])

    def backward(
        self, inputs: Inputs, state: Tensors, rounds: Rounds, dy: Tensor, dstate: Tensors
    ) -> tuple[Inputs, Tensors]:
        chunks = _Chunks(self, inputs, state, rounds)
        return chunks.gradients(chunks.write(), dy, dstate)


class _Swept(NamedTuple):
    """What the walk over the chunks leaves.

    before: the memory before each chunk. points: the memory that z is computed from; `before` in
    exact mode. final: the memory after the last chunk of each sequence, [sequences * heads, m, d].
    """

    z: Tensor
    writes: Tensor
    before: Tensor
    points: Tensor
    final: Tensor


class _Chunks:
    """The chunks of a segment, apart from the memories."""

    def __init__(self, options: Compression, inputs: Inputs, state: Tensors, rounds: Rounds):
        self.query, self.x, self.target, log_decay, step_size = cast(Tensors, inputs)
        self.transposed, self.stale = options.transposed, options.stale
        #: Whether z reads a memory that the token itself has decayed.
        self.after = options.error_at == "after"
        self.phi: Phi = PHI[options.phi]
        self.step_size = step_size[..., None]
        self.decay = Decay(log_decay)
        self.memory, heads = state[0].flatten(0, 1), state[0].shape[1]
        self.parts = rounds.parts(heads)
        self.x_to_end = self.x * self.decay.end
        #: How the memory before the chunk, or the anchor, has decayed when z reads it, [G, c, 1].
        #: None: an anchor that has not decayed at all.
        self.z_start: Tensor | None = None
        if self.stale:
            if self.after:
                self.z_start = self.decay.own
            self.anchor = state[1].flatten(0, 1)
            #: Rows of the first round that go on inside a mini-batch, [sequences * heads, 1, 1].
            self.goes_on: Tensor | None = None
            if rounds.empty is not None:
                begun = rounds.empty[: rounds.counts[0], 0]
                self.goes_on = begun.repeat_interleave(heads)[:, None, None]
        else:
            #: How the writes of the tokens s < t have decayed when z_t reads them, [G, c, c].
            if self.after:
                self.z_start, self.z_within = self.decay.start, self.decay.within_strictly()
            else:
                self.z_start, self.z_within = self.decay.start_before(), self.decay.within_before()
            self.coupling = lower(self.z_within, self.x @ self.x.mT)

    def _decayed(self, rows: Tensor, part: slice = slice(None)) -> Tensor:
        """rows [G, c, ...] of some chunks times `z_start`."""
        return rows if self.z_start is None else self.z_start[part] * rows

    def write(self) -> _Swept:
        """Chunk after chunk: the only part that is sequential."""
        current = self.memory.clone()
        before = current.new_empty(len(self.x), *current.shape[1:])
        points = before
        if self.stale and self.goes_on is not None:
            points = torch.empty_like(before)
        z, writes = torch.empty_like(self.target), torch.empty_like(self.target)
        x_total = self.x.sum((1, 2), keepdim=True) * 0
        for part in self.parts:
            memory = current[: part.stop - part.start]
            before[part] = memory
            if not self.stale:
                self._substitute(part, memory, z[part], writes[part])
            else:
                point = memory
                if points is not before:
                    if part is self.parts[0]:
                        point = torch.where(cast(Tensor, self.goes_on), self.anchor, memory)
                    points[part] = point
                torch.bmm(self.x[part], point.mT, out=z[part])
                if self.z_start is not None:
                    z[part].mul_(self.z_start[part])
                gradient = self.phi.gradient(z[part], self.target[part])
                torch.mul(gradient, self.step_size[part], out=writes[part])
            memory.mul_(self.decay.whole[part])
            memory.baddbmm_(writes[part].mT, self.x_to_end[part], alpha=-1)
            # NaN everywhere if a write or an x is not finite: zero times infinity is NaN.
            memory += writes[part].sum((1, 2), keepdim=True) * 0 + x_total[part]
        return _Swept(z, writes, before, points, current)

    def _substitute(self, part: slice, memory: Tensor, z: Tensor, writes: Tensor) -> None:
        """Forward substitution: row t of z reads the writes of the rows before it."""
        target, step_size, coupling = self.target[part], self.step_size[part], self.coupling[part]
        base = self._decayed(self.x[part] @ memory.mT, part)
        if self.phi.linear:
            writes.copy_(
                torch.linalg.solve_triangular(
                    step_size * coupling, step_size * (base - target),
                    upper=False, unitriangular=True,
                )
            )  # fmt: skip
            torch.baddbmm(base, coupling, writes, alpha=-1, out=z)
            return
        # Rows that are not yet written are zero, so that every row takes the whole product. Each
        # row of z lies in one piece, [c, G, 1, m]: into any other place a product is slow.
        writes.zero_()
        elementwise = self.phi if isinstance(self.phi, Elementwise) else None
        goals = -step_size * target if elementwise else target
        pieces = base.transpose(0, 1).contiguous().unsqueeze(2)
        rows = (rows.split(1, dim=1) for rows in (writes, coupling, step_size, goals))
        for z_t, write, coupled, step, goal in zip(pieces.unbind(0), *rows):
            z_t.baddbmm_(coupled, writes, alpha=-1)
            if elementwise:
                elementwise.write(z_t, step, goal, write)
            else:
                torch.mul(self.phi.gradient(z_t, goal), step, out=write)
        z.copy_(pieces.squeeze(2).transpose(0, 1))

    def read(self, swept: _Swept) -> Tensor:
        """y of all chunks. A head is NaN from its first write that is not finite on.

        Such writes are kept out of the rows before them, which the products below multiply by
        zero: zero times infinity is NaN.
        """
        x, writes, memory = self.x, swept.writes, swept.before
        broken = None
        if x.device.type != "cpu" or not torch.isfinite(x.sum() + writes.sum()):
            finite = ((writes * 0).sum(-1, keepdim=True) + (x * 0).sum(-1, keepdim=True)) == 0
            broken = (~finite).cumsum(1) > 0
            x, writes = x.masked_fill(broken, 0), writes.masked_fill(broken, 0)
        keys, values, matrix = (writes, x, memory) if self.transposed else (x, writes, memory.mT)
        scores = lower(self.decay.within, self.query @ keys.mT)
        y = (self.query @ matrix).mul_(self.decay.start).baddbmm_(scores, values, alpha=-1)
        return y if broken is None else y.masked_fill_(broken, math.nan)

    def gradients(self, swept: _Swept, dy: Tensor, dstate: Tensors) -> tuple[Inputs, Tensors]:
        x, (z, writes, before, points, _) = self.x, swept
        dquery, dx, dwrites, dmemory, pairs, starts = self._read_gradients(swept, dy)
        dz, dcode, to_end, dstart = self._back(swept, dwrites, dmemory, dstate)
        dafter = dmemory  # of the memory after each chunk

        # The next memory.
        dx -= self.decay.end * (writes @ dafter)
        pairs[:, -1] -= (writes * to_end).sum(-1)
        starts[:, -1] += self.decay.whole[:, 0, 0] * (dafter * before).sum((1, 2))

        # The gradient step itself, from x and what z reads.
        started_dz = self._decayed(dz)
        dx.baddbmm_(started_dz, points)
        if not self.stale:
            dz_writes = dz @ writes.mT
            mixed = lower(self.z_within, dz_writes)
            dx.baddbmm_(mixed + mixed.mT, x, alpha=-1)
            z_pairs = self.coupling * dz_writes
            z_starts = (started_dz * (x @ before.mT)).sum(-1)
            if self.after:
                pairs -= z_pairs
                starts += z_starts
            else:  # z_t sees the decays up to t - 1: one row up
                pairs[:, :-1] -= z_pairs[:, 1:]
                starts[:, :-1] += z_starts[:, 1:]
        dlog_decay = log_decay_gradient(pairs, starts)
        if self.stale and self.after:  # z_t is proportional to the decay of token t
            dlog_decay += (dz * z).sum(-1)
        dstep_size = (self.phi.gradient(z, self.target) * dwrites).sum(-1)
        return (dquery, dx, dcode.neg_(), dlog_decay, dstep_size), dstart

    def _read_gradients(self, swept: _Swept, dy: Tensor) -> tuple[Tensor, ...]:
        """What flows back through the reads alone.

        To query, x, the writes, the memories before the chunks; and to the decay: pairs[t, s]
        weighs the decays of s+1 .. t, starts[t] those of 1 .. t.
        """
        query, x, decay, transposed = self.query, self.x, self.decay, self.transposed
        writes, before = swept.writes, swept.before
        keys, values = (writes, x) if transposed else (x, writes)
        scores = lower(decay.within, query @ keys.mT)
        values_dot_dy = dy @ values.mT
        inner = lower(decay.within, values_dot_dy)
        dstarted = decay.start * (dy @ (before.mT if transposed else before))
        starts = (query * dstarted).sum(-1)
        dquery = dstarted.baddbmm_(inner, keys, alpha=-1)
        dkeys, dvalues = (inner.mT @ query).neg_(), (scores.mT @ dy).neg_()
        dwrites, dx = (dkeys, dvalues) if transposed else (dvalues, dkeys)
        started = decay.start * query
        dmemory = started.mT @ dy if transposed else dy.mT @ started
        return dquery, dx, dwrites, dmemory, (scores * values_dot_dy).neg_(), starts

    def _back(
        self, swept: _Swept, dwrites: Tensor, dmemory: Tensor, dstate: Tensors
    ) -> tuple[Tensor, Tensor, Tensor, Tensors]:
        """From the last chunk to the first.

        dwrites, dmemory: what flows back from the reads to the writes and to the memories before
        the chunks. dwrites is completed in place; dmemory is exchanged for the gradients of the
        memories after the chunks. Returns the gradients of z, of phi(z) - target and of the state
        at the start, and the product of x_to_end and those of the memories after.
        """
        z, target, step_size = swept.z, self.target, self.step_size
        through = slope = None
        if isinstance(self.phi, Elementwise):
            change, slope = self.phi.diagonals(z, target)
            through = step_size * change
        dz, dcode, to_end = torch.empty_like(z), torch.empty_like(z), torch.empty_like(z)
        current = dstate[0].flatten(0, 1).clone()
        danchor = dstate[1].flatten(0, 1) if self.stale else current
        dstart_anchor = torch.zeros_like(danchor)
        following = 0  # rows of the round after
        for part in reversed(self.parts):
            rows = part.stop - part.start
            now = current[:rows]
            dafter = now.clone()
            torch.bmm(self.x_to_end[part], now.mT, out=to_end[part])
            dwrites[part] -= to_end[part]
            now.mul_(self.decay.whole[part]).add_(dmemory[part])
            dmemory[part] = dafter
            if not self.stale:
                self._substitute_back(part, z, dz, dcode, dwrites, through)
                now.baddbmm_(self._decayed(dz[part], part).mT, self.x[part])
                continue
            if through is not None:
                torch.mul(through[part], dwrites[part], out=dz[part])
            else:
                dz[part], dcode[part] = self.phi.tangent(
                    z[part], target[part], step_size[part] * dwrites[part]
                )
            dpoint = torch.bmm(self._decayed(dz[part], part).mT, self.x[part])
            dpoint[following:] += danchor[following:rows]  # sequences that end with this chunk
            if part is self.parts[0] and self.goes_on is not None:
                dstart_anchor = dpoint.masked_fill(~self.goes_on, 0)
                dpoint.masked_fill_(self.goes_on, 0)
            now += dpoint
            following = rows
        if slope is not None:
            dcode = slope.mul_(step_size).mul_(dwrites)
        shape = dstate[0].shape
        dstart: Tensors = (current.view(shape),)
        if self.stale:
            dstart += (dstart_anchor.view(shape), dstate[2])
        return dz, dcode, to_end, dstart

    def _substitute_back(
        self, part: slice, z: Tensor, dz: Tensor, dcode: Tensor, dwrites: Tensor,
        through: Tensor | None,
    ) -> None:  # fmt: skip
        """The substitution in reverse: fills dz and dcode, and completes dwrites."""
        step_size = self.step_size[part]
        coupling = self.coupling[part].mT.contiguous()  # [s, t]: what row s fed into row t
        dz, dcode, dwrites = dz[part], dcode[part], dwrites[part]
        if self.phi.linear:
            dwrites.copy_(
                torch.linalg.solve_triangular(
                    (step_size * self.coupling[part]).mT, dwrites, upper=True, unitriangular=True
                )
            )
            torch.mul(step_size, dwrites, out=dz)
            dcode.copy_(dz)
            return
        dz.zero_()
        pieces = dwrites.transpose(0, 1).contiguous().unsqueeze(2)  # as in the substitution
        slopes = None if through is None else through[part]
        for t in range(z.shape[1] - 1, -1, -1):
            row = slice(t, t + 1)
            dwrite = pieces[t].baddbmm_(coupling[:, row], dz, alpha=-1)
            if slopes is not None:
                torch.mul(slopes[:, row], dwrite, out=dz[:, row])
            else:
                dz[:, row], dcode[:, row] = self.phi.tangent(
                    z[part][:, row], self.target[part][:, row], step_size[:, row] * dwrite
                )
        dwrites.copy_(pieces.squeeze(2).transpose(0, 1))
