"""Which tokens the i-th chunk of every sequence holds.

Sequences may differ in length (a pack) and, where chunks are mini-batches, in where their first
one starts: one that goes on after `offset` tokens of a mini-batch is aligned by leaving the first
`offset` places of its first chunk empty. Sequences are sorted by their number of chunks, longest
first, so that those still running at chunk i are the first `active(i)` of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks


class ChunkLayout:
    def __init__(self, bounds: list[int], offsets: list[int], chunk: int, device: torch.device):
        """Sequence n holds rows bounds[n] to bounds[n + 1] of the flat token axis."""
        starts = bounds[:-1]
        lengths = [end - start for start, end in zip(starts, bounds[1:])]
        # An empty sequence has no chunks, whatever its offset.
        reach = [o + length if length else 0 for o, length in zip(offsets, lengths)]
        counts = [-(-r // chunk) for r in reach]
        order = sorted(range(len(counts)), key=lambda n: -counts[n])
        self.chunk = chunk
        self.device = device
        #: Whether sorting changes nothing.
        self.in_order = order == list(range(len(order)))
        self.order = torch.tensor(order, dtype=torch.long, device=device)
        self.counts = [counts[n] for n in order]
        self._first = [starts[n] - offsets[n] for n in order]
        self._offsets = [offsets[n] for n in order]
        self._reach = [reach[n] for n in order]
        self.chunks = self.counts[0] if self.counts else 0
        self._active = [sum(c > i for c in self.counts) for i in range(self.chunks)]

    @staticmethod
    def of(
        batch: int,
        tokens: int,
        cu_seqlens: Tensor | None,
        chunk: int,
        device: torch.device,
        offsets: list[int] | None = None,
    ) -> ChunkLayout:
        """Of rows [batch, tokens, ...], or of the pack that cu_seqlens describes."""
        if cu_seqlens is None:
            bounds = [n * tokens for n in range(batch + 1)]
        else:
            bounds = checks.bounds(cu_seqlens, tokens)
        return ChunkLayout(bounds, offsets or [0] * (len(bounds) - 1), chunk, device)

    def sort(self, state: Tensor) -> Tensor:
        """[N, ...] in the order of sequences that chunks come in; a copy."""
        return state.index_select(0, self.order)

    def unsort(self, state: Tensor) -> Tensor:
        """The reverse of `sort`; a copy."""
        return torch.empty_like(state).index_copy_(0, self.order, state)

    def active(self, i: int) -> int:
        """How many sequences have a chunk i; none past the last chunk."""
        return self._active[i] if i < self.chunks else 0

    def chunk_rows(self, i: int) -> ChunkRows:
        """The rows of every sequence's chunk i, no wider than the longest of them."""
        n = self.active(i)
        width = min(self.chunk, max(self._reach[:n]) - i * self.chunk)
        return self._rows([i], width)

    def segment_rows(self, first: int, stop: int) -> ChunkRows:
        """The rows of chunks first .. stop - 1: all that are the i-th of their sequence, by i."""
        if stop - first == 1:
            return self.chunk_rows(first)
        return self._rows(list(range(first, stop)), self.chunk)

    def _rows(self, places: list[int], width: int) -> ChunkRows:
        which = [n for i in places for n in range(self.active(i))]
        begin = [i * self.chunk for i in places for _ in range(self.active(i))]
        first = self._column([self._first[n] for n in which])
        place = self._column(begin) + torch.arange(width, device=self.device)
        rows = first + place
        low, high = [self._offsets[n] for n in which], [self._reach[n] for n in which]
        if all(lo <= b and b + width <= hi for lo, b, hi in zip(low, begin, high)):
            return ChunkRows(rows, None)
        return ChunkRows(rows, (place < self._column(low)) | (place >= self._column(high)))

    def _column(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)[:, None]


class ChunkRows:
    """Rows [n, c] of the flat token axis, and which of the places are empty (None: none is)."""

    def __init__(self, rows: Tensor, empty: Tensor | None):
        self.shape = rows.shape
        self.empty = empty
        self.rows = rows.flatten() if empty is None else rows.masked_fill(empty, 0).flatten()
        self.filled = None if empty is None else (~empty).flatten().nonzero().squeeze(1)

    def take(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens, H, ...] -> [n * H, c, ...], zeros in empty places."""
        n, c = self.shape
        taken = flat.index_select(0, self.rows).to(dtype)
        taken = taken.view(n, c, *flat.shape[1:])
        if self.empty is not None:
            taken = taken.masked_fill(self.empty.view(n, c, *[1] * (flat.dim() - 1)), 0)
        return taken.transpose(1, 2).reshape(n * flat.shape[1], c, *flat.shape[2:])

    def put(self, flat: Tensor, values: Tensor) -> None:
        """The reverse of `take`: [n * H, c, ...] into the rows of flat [tokens, H, ...]."""
        n, c = self.shape
        heads = flat.shape[1]
        values = values.view(n, heads, c, *flat.shape[2:]).transpose(1, 2)
        values = values.reshape(n * c, heads, *flat.shape[2:]).to(flat.dtype)
        if self.filled is None:
            flat.index_copy_(0, self.rows, values)
        else:
            flat.index_copy_(0, self.rows[self.filled], values[self.filled])
