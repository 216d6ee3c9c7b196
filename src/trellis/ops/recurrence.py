"""Recurrences with a state of fixed size, over batches and packs of sequences.

A `Recurrence` defines itself twice: `reference` computes token after token, and `forward` computes
some chunks of tokens at once, in matrix form. `run` takes either over all sequences.

The chunked run goes through the sequences in segments of several chunks. For its backward it keeps
the inputs and the states at the segments' starts. What a segment computes on the way is computed
again when its gradients are due, so it never exists for more than one segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import checks
from . import fla
from .dispatch import Backend, Backends, no_autocast, refuse_double_backward, uncompiled

Tensors = tuple[Tensor, ...]
#: An input may be None where a recurrence has a cheaper form without it, such as no decay.
Inputs = tuple[Tensor | None, ...]


class Rounds(NamedTuple):
    """The chunks of a segment: round i holds one chunk of each of the first counts[i] sequences.

    empty: [chunks, C], True at places that hold no token; None if all do. Inputs are zero there.
    """

    counts: list[int]
    empty: Tensor | None

    def parts(self, heads: int) -> list[slice]:
        """The rows of each round in tensors [chunks * heads, ...]."""
        ends = [0]
        for count in self.counts:
            ends.append(ends[-1] + count * heads)
        return [slice(begin, end) for begin, end in zip(ends, ends[1:])]

    def last_rows(self, heads: int, device: torch.device) -> Tensor:
        """[counts[0] * heads]: the row of each sequence's and head's last chunk in the segment."""
        last = torch.empty(self.counts[0] * heads, dtype=torch.long, device=device)
        for part in self.parts(heads):
            last[: part.stop - part.start] = torch.arange(part.start, part.stop, device=device)
        return last


class Recurrence:
    """Subclasses are frozen dataclasses of their options."""

    #: Tokens per chunk. Where a recurrence works in mini-batches, a chunk is a mini-batch.
    chunk: int = 64
    #: Tokens of a segment, counted over all sequences; what it computes should fit in caches.
    segment_tokens: ClassVar[int] = 1024
    #: The fewest tokens of a segment, counted in each sequence. A state is kept for every segment
    #: and should take less memory than the inputs of the segment.
    segment_least: ClassVar[int] = 64
    #: How many of the state's tensors, the first ones, differ from segment to segment in what
    #: `backward` reads of them. The others are kept once. None stands for all.
    changing: ClassVar[int | None] = None
    #: The function of ops/fla.py that computes a Call by kernels of flash-linear-attention, or why
    #: there is none.
    adapter: ClassVar[Callable[[Call], tuple[Tensor, Tensors]] | str] = (
        "flash-linear-attention has no such recurrence"
    )

    def output(self, inputs: Inputs) -> tuple[int, int]:
        """Heads and width of y, for inputs [B, T, heads, ...]."""
        raise NotImplementedError

    def reference(self, inputs: Inputs, state: Tensors) -> tuple[Tensor, Tensors]:
        """The definition, for sequences of equal length.

        inputs: [N, T, heads, ...] each. state: [N, ...] each. Returns y [N, T, heads, width] and
        the state after the last token. Everything is in the dtype of the computation.
        """
        raise NotImplementedError

    def forward(self, inputs: Inputs, state: Tensors, rounds: Rounds) -> tuple[Tensor, Tensors]:
        """The chunks of one segment.

        inputs: [chunks * heads, c, ...] each, c <= chunk; chunks come round by round. state:
        [n, ...] each, of the n = rounds.counts[0] sequences before their first chunk here.
        Returns y [chunks * heads, c, width] and the state of all n after their last chunk here.
        """
        raise NotImplementedError

    def backward(
        self, inputs: Inputs, state: Tensors, rounds: Rounds, dy: Tensor, dstate: Tensors
    ) -> tuple[Inputs, Tensors]:
        """Gradients of `forward` for inputs and state, given those of y and of the state after.

        `state` is what `forward` had, but for the tensors beyond `changing`, which are those
        before the first segment.
        """
        raise NotImplementedError


class Call(NamedTuple):
    """The arguments of `run`, for its backends."""

    recurrence: Recurrence
    inputs: Inputs
    state: Tensors
    cu_seqlens: Tensor | None
    offset: Tensor | None

    @property
    def first(self) -> Tensor:
        """The first input, which is always given: [B, T, heads, ...]."""
        first = self.inputs[0]
        assert first is not None
        return first


def run(
    recurrence: Recurrence,
    inputs: Inputs,
    state: Tensors,
    *,
    cu_seqlens: Tensor | None = None,
    offset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensors]:
    """y [B, T, heads, width] and the final states, in the dtype of `state`; y by fla's kernels in
    that of the inputs.

    inputs: [B, T, heads, ...] each, B = 1 with cu_seqlens. state: [N, ...] each, in the dtype of
    the computation. offset: [N], integer, for recurrences over mini-batches: how many tokens of
    the mini-batch under way each sequence has read.
    """
    checks.choice("backend", backend, BACKENDS)
    call = Call(recurrence, inputs, state, cu_seqlens, offset)
    one_token = cu_seqlens is None and call.first.shape[1] == 1
    return _BACKENDS.choose(backend, call, one_token=one_token).run(call)


def _run_reference(call: Call) -> tuple[Tensor, Tensors]:
    recurrence, inputs, state, cu_seqlens, _ = call
    with no_autocast(call.first.device):
        dtype = state[0].dtype
        inputs = tuple(x if x is None or x.dtype == dtype else x.to(dtype) for x in inputs)
        if cu_seqlens is None:
            return recurrence.reference(inputs, state)
        bounds = checks.bounds(cu_seqlens, call.first.shape[1])
        if len(bounds) == 1:  # a pack of no sequences
            return recurrence.reference(inputs, state)
        runs = [
            recurrence.reference(
                tuple(None if x is None else x[:, begin:end] for x in inputs),
                tuple(s[n : n + 1] for s in state),
            )
            for n, (begin, end) in enumerate(zip(bounds, bounds[1:]))
        ]
        finals = zip(*(final for _, final in runs))
        return torch.cat([y for y, _ in runs], dim=1), tuple(torch.cat(parts) for parts in finals)


@uncompiled
def _run_chunked(call: Call) -> tuple[Tensor, Tensors]:
    recurrence, inputs, state, _, _ = call
    layout = _layout(call)
    graded = torch.is_grad_enabled()  # inside an autograd.Function it is always off
    y, *final = _Chunked.apply(recurrence, layout, graded, len(inputs), *inputs, *state)
    return y, tuple(final)


_BACKENDS = Backends(
    Backend("fla", fla.run, fla.unfit, fla.missing),
    Backend("chunked", _run_chunked, one_token=False),
    Backend("reference", _run_reference),
)
#: What the argument `backend` of an op on a recurrence may be.
BACKENDS = _BACKENDS.names


def _layout(call: Call) -> ChunkLayout:
    first = call.first
    batch, tokens = first.shape[:2]
    chunk = call.recurrence.chunk
    if call.cu_seqlens is None:
        bounds = [n * tokens for n in range(batch + 1)]
    else:
        bounds = checks.bounds(call.cu_seqlens, tokens)
    offsets = [0] * (len(bounds) - 1)
    if call.offset is not None:
        offsets = checks.offsets(call.offset, chunk)
    return ChunkLayout(bounds, offsets, chunk, first.device)


class ChunkLayout:
    """Which tokens the i-th chunk of every sequence holds.

    Sequences may differ in length (a pack) and, where chunks are mini-batches, in where their
    first one starts: a sequence that goes on after `offset` tokens of a mini-batch leaves the
    first `offset` places of its first chunk empty. Sequences are sorted by their number of chunks,
    the longest first, so that those that have a chunk i are the first `active(i)` of them.
    """

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
        #: Whether the sequences are sorted as they are given.
        self.in_order = order == list(range(len(order)))
        self.order = torch.tensor(order, dtype=torch.long, device=device)
        counts = [counts[n] for n in order]
        self.chunks = counts[0] if counts else 0
        self._first = [starts[n] - offsets[n] for n in order]
        self._offsets = [offsets[n] for n in order]
        self._reach = [reach[n] for n in order]
        self._active = [sum(c > i for c in counts) for i in range(self.chunks)]

    def active(self, i: int) -> int:
        """How many sequences have a chunk i."""
        return self._active[i]

    def sort(self, state: Tensor) -> Tensor:
        """[N, ...] in the order of sequences that chunks come in.

        Not a copy where none is needed: what is kept for the backward is then the caller's tensor.
        """
        return state if self.in_order else state.index_select(0, self.order)

    def unsort(self, state: Tensor) -> Tensor:
        """The reverse of `sort`; always a copy."""
        return torch.empty_like(state).index_copy_(0, self.order, state)

    def segments(self, recurrence: Recurrence) -> list[tuple[int, int]]:
        """(first, stop) of the rounds of every segment; none on meta, where nothing is computed."""
        found, first = [], 0
        while first < self.chunks and self.device.type != "meta":
            shared = recurrence.segment_tokens // self.active(first)
            rounds = max(1, max(recurrence.segment_least, shared) // self.chunk)
            stop = min(first + rounds, self.chunks)
            found.append((first, stop))
            first = stop
        return found

    def rows(self, first: int, stop: int) -> tuple[ChunkRows, Rounds]:
        """Chunks first .. stop - 1 of all sequences, round by round.

        A single round is no wider than the longest of its chunks.
        """
        width = self.chunk
        if stop - first == 1:
            width = min(width, max(self._reach[: self.active(first)]) - first * self.chunk)
        which = [n for i in range(first, stop) for n in range(self.active(i))]
        begin = [i * self.chunk for i in range(first, stop) for _ in range(self.active(i))]
        place = self._column(begin) + torch.arange(width, device=self.device)
        tokens = self._column([self._first[n] for n in which]) + place
        low, high = [self._offsets[n] for n in which], [self._reach[n] for n in which]
        empty = None
        if not all(lo <= b and b + width <= hi for lo, b, hi in zip(low, begin, high)):
            empty = (place < self._column(low)) | (place >= self._column(high))
        return ChunkRows(tokens, empty), Rounds(self._active[first:stop], empty)

    def _column(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)[:, None]


class ChunkRows:
    """The tokens of n chunks: rows [n, c] of the flat token axis; `empty` as in Rounds."""

    def __init__(self, rows: Tensor, empty: Tensor | None):
        self.shape = rows.shape
        self.empty = empty
        self.rows = rows.flatten() if empty is None else rows.masked_fill(empty, 0).flatten()
        self.filled = None if empty is None else ~empty
        self._rows_of_heads: dict[int, Tensor] = {}

    def take(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens, H, ...] -> [n * H, c, ...], zeros in empty places."""
        (n, c), heads = self.shape, flat.shape[1]
        taken = flat.flatten(0, 1).index_select(0, self._by_head(heads)).to(dtype)
        taken = taken.view(n * heads, c, *flat.shape[2:])
        if self.empty is not None:
            empty = self.empty.repeat_interleave(heads, dim=0)
            taken = taken.masked_fill(empty.view(n * heads, c, *[1] * (flat.dim() - 2)), 0)
        return taken

    def _by_head(self, heads: int) -> Tensor:
        """The rows [n, heads, c], flat, of tensors [tokens * heads, ...]."""
        if heads not in self._rows_of_heads:
            head = torch.arange(heads, device=self.rows.device)[:, None]
            rows = (self.rows.view(self.shape)[:, None] * heads + head).flatten()
            self._rows_of_heads[heads] = rows
        return self._rows_of_heads[heads]

    def take_all(self, flat: Inputs, dtype: torch.dtype) -> Inputs:
        return tuple(None if x is None else self.take(x, dtype) for x in flat)

    def put(self, flat: Tensor, values: Tensor) -> None:
        """The reverse of `take`: [n * H, c, ...] into the rows of flat [tokens, H, ...]."""
        heads = flat.shape[1]
        rows, values = self._by_head(heads), values.flatten(0, 1).to(flat.dtype)
        if self.filled is not None:
            filled = self.filled.repeat_interleave(heads, dim=0).flatten()
            rows, values = rows[filled], values[filled]
        flat.flatten(0, 1).index_copy_(0, rows, values)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        recurrence: Recurrence,
        layout: ChunkLayout,
        graded: bool,
        count: int,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """tensors: `count` inputs, then the states."""
        inputs = tensors[:count]
        state = tuple(layout.sort(s) for s in tensors[count:] if s is not None)
        dtype = state[0].dtype
        flat = _flat(inputs)
        assert flat[0] is not None
        assert inputs[0] is not None
        y = flat[0].new_empty(flat[0].shape[0], *recurrence.output(inputs), dtype=dtype)
        kept: list[Tensor] = []
        keep = graded and any(ctx.needs_input_grad)
        with no_autocast(layout.device):
            for first, stop in layout.segments(recurrence):
                rows, rounds = layout.rows(first, stop)
                before = tuple(s[: rounds.counts[0]] for s in state)
                if keep:
                    kept += before[: recurrence.changing] if kept else before
                out, after = recurrence.forward(rows.take_all(flat, dtype), before, rounds)
                rows.put(y, out)
                state = tuple(replaced(old, new) for old, new in zip(state, after))
        ctx.save_for_backward(*inputs, *kept)
        ctx.setting = recurrence, layout, count, len(state)
        return y.view(*inputs[0].shape[:2], *y.shape[1:]), *(layout.unsort(s) for s in state)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        # saved_tensors is read once: activation checkpointing allows no more.
        found = _Gradients.apply(*ctx.setting, *gradients, *ctx.saved_tensors)
        return None, None, None, None, *found


class _Gradients(torch.autograd.Function):
    """The backward of _Chunked, as a function that can refuse to be differentiated in turn."""

    @staticmethod
    def forward(
        ctx: Any,
        recurrence: Recurrence,
        layout: ChunkLayout,
        count: int,
        states: int,
        dy: Tensor,
        *tensors: Any,
    ) -> tuple[Tensor | None, ...]:
        """tensors: the gradients of the final states, the inputs, the states that were kept."""
        dstate = tuple(layout.sort(d) for d in tensors[:states])
        inputs, kept = tensors[states : states + count], list(tensors[states + count :])
        flat = _flat(inputs)
        grads = [None if x is None else torch.empty_like(x) for x in flat]
        dy = dy.flatten(0, 1)
        dtype = dstate[0].dtype
        changing = states if recurrence.changing is None else recurrence.changing
        constant = kept[changing:states]
        del kept[changing:states]
        with no_autocast(layout.device):
            for first, stop in reversed(layout.segments(recurrence)):
                rows, rounds = layout.rows(first, stop)
                n = rounds.counts[0]
                state = (*kept[-changing:], *(s[:n] for s in constant))
                del kept[-changing:]
                dinputs, before = recurrence.backward(
                    rows.take_all(flat, dtype), state, rounds,
                    rows.take(dy, dtype), tuple(d[:n] for d in dstate),
                )  # fmt: skip
                for whole, part in zip(grads, dinputs):
                    if whole is not None and part is not None:
                        rows.put(whole, part)
                dstate = tuple(replaced(old, new) for old, new in zip(dstate, before))
        shaped = (None if g is None else g.view_as(x) for g, x in zip(grads, inputs))
        return *shaped, *(layout.unsort(d) for d in dstate)

    backward = staticmethod(refuse_double_backward)


def _flat(inputs: Sequence[Tensor | None]) -> Inputs:
    """[B, T, ...] each -> [B * T, ...], contiguous."""
    return tuple(None if x is None else x.flatten(0, 1).contiguous() for x in inputs)


def replaced(old: Tensor, new: Tensor) -> Tensor:
    """`old` with its first rows exchanged for `new`."""
    return new if len(new) == len(old) else torch.cat([new, old[len(new) :]])
