"""What a slot keeps of a token: w(t, s)[m], the product of its decays over s+1 .. t.

With one decay per slot, the weights of a chunk are c x c x M numbers. They are never built: both
passes, and their backwards, are sums over pairs s <= t that need them in two ways only,

    spread(P)    out[t, m] = sum over s of P[t, s] w(t, s)[m] a[s, m]
    contract(x)  S[t, s]   = sum over m of x[t, m] w(t, s)[m] a[s, m]

All tensors are [G, c, ...] with G = chunks x heads; a, the write weights, are [G, c, M].
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..decay import flushed

#: Tokens of the blocks that are left when halving ends; a chunk is a power of 2 times as long.
LEAF = 4


class Pass(NamedTuple):
    """How one pass used the weights: sum over t, m of x[t, m] (read + spread(scores))[t, m].

    read [G, c, M]: of the memory at the chunk's start, decayed. parts: spread's contributions.
    """

    x: Tensor
    read: Tensor
    scores: Tensor
    parts: list[Tensor]


class Constant:
    """Without decay w = 1, and both are plain products."""

    def __init__(self, write: Tensor):
        self.write = write

    def spread(self, scores: Tensor) -> tuple[Tensor, list[Tensor]]:
        """`spread`, and the contributions to it that `gradients` asks for."""
        return scores.tril() @ self.write, []

    def contract(self, x: Tensor) -> Tensor:
        return (x @ self.write.mT).tril_()

    def from_start(self, x: Tensor) -> Tensor:
        """x [G, c, M], decayed from the chunk's start up to and with each token."""
        return x

    def to_end(self, x: Tensor) -> Tensor:
        """x [G, c, M], decayed from after each token to the chunk's end."""
        return x

    def next(self, memory: Tensor, added: Tensor, part: slice) -> Tensor:
        """memory [g, M, D] of the chunks `part`, decayed over the whole chunk, plus `added`."""
        return memory + added

    def gradients(
        self, passes: list[Pass], ends: Tensor, memories: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of the write weights and of log_decay.

        ends [G, c, M]: the gradient of to_end(write). memories: each memory [G, M, D] at the
        chunk's start, with its gradient at the chunk's end.
        """
        for one in passes:
            ends = torch.baddbmm(ends, one.scores.tril().mT, one.x)
        return ends, None


class Decaying(Constant):
    """Decay by halving: every pair s <= t is in two halves of some block, or in one leaf.

    In a block of 2h tokens, w(t, s) for t in the second half and s in the first is the decay from
    the block's middle to t times that from s to the middle: two factors of at most 1, so that the
    block's pairs are one matrix product. The factors are products, for all sizes of block at once:
    ratios of exponentials would overflow, and differences of cumulated logs lose digits. In leaves
    the weights are built for each distance t - s.
    """

    def __init__(self, write: Tensor, log_decay: Tensor):
        super().__init__(write)
        slots = write.shape[2]
        decay = flushed(log_decay.exp())
        #: w(t, t - d) a(t - d) for t >= d in every leaf, for each d; [leaves, LEAF - d, M]
        self.near = [write.view(-1, LEAF, slots)]
        self.decay = decay.view(-1, LEAF, slots)
        for d in range(1, LEAF):
            self.near.append(flushed(self.decay[:, d:] * self.near[-1][:, :-1]))
        #: (h, middle to t, s to middle, the latter times a(s)) of all blocks; [blocks, h, M]
        self.levels: list[tuple[int, Tensor, Tensor, Tensor]] = []
        # From the start of the token's block up to it, and from after it to the block's end.
        start, end = decay.clone(), torch.ones_like(decay)
        h = 1
        while h < write.shape[1]:
            (first, second), (before, _) = _halves(start, h), _halves(end, h)
            from_middle, to_middle = flushed(second), flushed(before)
            if h >= LEAF:
                written = to_middle * _halves(write, h)[0]
                self.levels.append((h, from_middle, to_middle, written))
            torch.mul(to_middle, from_middle[:, -1:], out=before)
            torch.mul(from_middle, first[:, -1:], out=second)
            h *= 2
        self.start, self.end = flushed(start), flushed(end)
        self.whole = self.start[:, -1:].mT

    def spread(self, scores: Tensor) -> tuple[Tensor, list[Tensor]]:
        leaves = _diagonal_blocks(scores, LEAF)
        out = _below(leaves, 0) * self.near[0]
        for d in range(1, LEAF):
            out[:, d:].addcmul_(_below(leaves, d), self.near[d])
        out = out.view_as(self.write)
        parts = []
        for h, from_middle, _, written in self.levels:
            parts.append((_block(scores, h) @ written).mul_(from_middle))
            _halves(out, h)[1].add_(parts[-1])
        return out, parts

    def contract(self, x: Tensor) -> Tensor:
        chunks, c, slots = x.shape
        out = x.new_zeros(chunks, c, c)
        for h, from_middle, _, written in self.levels:
            _block_view(out, h).copy_(
                ((_halves(x, h)[1] * from_middle) @ written.mT)
                .view(chunks, -1, h, h).permute(0, 2, 3, 1)
            )  # fmt: skip
        leaves = x.reshape(-1, LEAF, slots)
        for d in range(LEAF):
            near = (leaves[:, d:] * self.near[d]).sum(2).view(chunks, -1, LEAF - d)
            _diagonal_view(out, LEAF).diagonal(-d, 1, 2).copy_(near)
        return out

    def from_start(self, x: Tensor) -> Tensor:
        return self.start * x

    def to_end(self, x: Tensor) -> Tensor:
        return self.end * x

    def next(self, memory: Tensor, added: Tensor, part: slice) -> Tensor:
        return torch.addcmul(added, self.whole[part], memory)

    def gradients(
        self, passes: list[Pass], ends: Tensor, memories: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        # `starts`, `finishes` and `wholes` are the gradients of the logs of what __init__ builds:
        # decays from a block's start, to its end, and over it. They go back through the halvings.
        # No sum takes away what another added, so that strong decay costs no digits.
        dwrite = self.end * ends
        finishes = self.write * dwrite
        starts = sum_of(one.x * one.read for one in passes)
        wholes = sum_of((memory * d).sum(2) for memory, d in memories) * self.whole.squeeze(2)
        h = self.write.shape[1] // 2
        levels = list(self.levels)
        while h:
            wholes = wholes[:, None].repeat(1, 2, 1)
            wholes[:, 0] += _halves(starts, h)[1].sum(1)
            wholes[:, 1] += _halves(finishes, h)[0].sum(1)
            wholes = wholes.flatten(0, 1)
            if h >= LEAF:
                self._level_gradients(levels.pop(), len(levels), passes, dwrite, starts, finishes)
            h //= 2
        starts += wholes.view_as(starts)
        self._leaf_gradients(passes, dwrite, starts)
        return dwrite, starts

    def _level_gradients(
        self,
        level: tuple[int, Tensor, Tensor, Tensor],
        place: int,
        passes: list[Pass],
        dwrite: Tensor,
        starts: Tensor,
        finishes: Tensor,
    ) -> None:
        h, from_middle, to_middle, _ = level
        found = None
        for x, _, scores, parts in passes:
            second = _halves(x, h)[1]
            _halves(starts, h)[1].addcmul_(second, parts[place])
            blocks, decayed = _block(scores, h).mT, second * from_middle
            found = blocks @ decayed if found is None else found.baddbmm_(blocks, decayed)
        assert found is not None
        found *= to_middle
        _halves(dwrite, h)[0].add_(found)
        _halves(finishes, h)[0].addcmul_(_halves(self.write, h)[0], found)

    def _leaf_gradients(self, passes: list[Pass], dwrite: Tensor, dlog_decay: Tensor) -> None:
        slots = dwrite.shape[2]
        leaves = [
            (one.x.view(-1, LEAF, slots), _diagonal_blocks(one.scores, LEAF)) for one in passes
        ]
        dlog_decay = dlog_decay.view(-1, LEAF, slots)
        dnear: Tensor | None = None  # the gradient of near[d], from which that of near[d - 1]
        for d in reversed(range(LEAF)):
            found = sum_of(_below(scores, d) * x[:, d:] for x, scores in leaves)
            if dnear is not None:
                found[:, :-1].addcmul_(self.decay[:, d + 1 :], dnear)
            dnear = found
            if d:
                dlog_decay[:, d:].addcmul_(self.near[d], dnear)
        assert dnear is not None
        dwrite += dnear.view_as(dwrite)


def sum_of(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


def _halves(x: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """First and second half of every block of 2h tokens of x [G, c, M]; [blocks, h, M], views."""
    first, second = x.view(-1, 2, h, x.shape[2]).unbind(1)
    return first, second


def _block_view(scores: Tensor, h: int) -> Tensor:
    """Rows of the second and columns of the first half of every block; [G, h, h, blocks]."""
    chunks, c, _ = scores.shape
    n = c // (2 * h)
    return scores.view(chunks, n, 2, h, n, 2, h)[:, :, 1, :, :, 0].diagonal(0, 1, 3)


def _block(scores: Tensor, h: int) -> Tensor:
    """The same as [G * blocks, h, h]."""
    return _block_view(scores, h).movedim(3, 1).reshape(-1, h, h)


def _diagonal_view(scores: Tensor, size: int) -> Tensor:
    """Blocks on the diagonal; [G, size, size, blocks]"""
    chunks, c, _ = scores.shape
    n = c // size
    return scores.view(chunks, n, size, n, size).diagonal(0, 1, 3)


def _diagonal_blocks(scores: Tensor, size: int) -> Tensor:
    """The same as [G * blocks, size, size]."""
    return _diagonal_view(scores, size).movedim(3, 1).reshape(-1, size, size)


def _below(blocks: Tensor, d: int) -> Tensor:
    """Pairs (t, t - d) of every block; [blocks, size - d, 1]"""
    return blocks.diagonal(-d, 1, 2)[..., None]
