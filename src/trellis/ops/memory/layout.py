"""Which tokens the i-th chunk of every sequence holds.

Sequences may differ in length (a pack) and, in stale mode, in where their first mini-batch
starts: one that goes on after `offset` tokens of a mini-batch is aligned by leaving the first
`offset` places of its first chunk empty. Sequences are sorted by their number of chunks, longest
first, so that those still running at chunk i are the first `active(i)` of them.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
        self.order = torch.tensor(order, dtype=torch.long, device=device)
        self.counts = [counts[n] for n in order]
        self._first = [starts[n] - offsets[n] for n in order]
        self._offsets = [offsets[n] for n in order]
        self._reach = [reach[n] for n in order]
        self.chunks = self.counts[0] if self.counts else 0
        self._active = [sum(c > i for c in self.counts) for i in range(self.chunks)]

    def active(self, i: int) -> int:
        """How many sequences have a chunk i; none past the last chunk."""
        return self._active[i] if i < self.chunks else 0

    def chunk_rows(self, i: int) -> ChunkRows:
        n = self.active(i)
        begin = i * self.chunk
        width = min(self.chunk, max(self._reach[:n]) - begin)
        first = torch.tensor(self._first[:n], device=self.device)[:, None]
        place = torch.arange(begin, begin + width, device=self.device)[None]
        rows = first + place
        padded = min(self._reach[:n]) < begin + width or (i == 0 and max(self._offsets[:n]) > 0)
        if not padded:
            return ChunkRows(rows, None)
        low = torch.tensor(self._offsets[:n], device=self.device)[:, None]
        high = torch.tensor(self._reach[:n], device=self.device)[:, None]
        return ChunkRows(rows, (place < low) | (place >= high))


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
