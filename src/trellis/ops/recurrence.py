"""Recurrences with a state of fixed size: token by token, or in segments of chunks.

A `Recurrence` defines itself twice: `reference`, token after token, and `forward`, the same for
some chunks at once in matrix form. `run` takes it over batches and packs. The chunked run keeps
for its backward the inputs and the states at segment starts; a segment's own intermediates are
computed again when its gradients are due, so they never exist for more than one segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import checks
from .dispatch import VARIABLE, asked_backend, no_autocast, uncompiled, under_transform
from .layout import ChunkLayout, ChunkRows

#: Tokens of a segment, counted over all sequences: what a segment computes should fit in caches.
SEGMENT_TOKENS = 1024

#: Tokens of a segment, at least, counted in each sequence: a state is kept for every segment, and
#: is to take less than the inputs of the segment.
SEGMENT_LEAST = 64

#: What every function on a recurrence accepts. The memory has backends of its own beside these.
BACKENDS = ("auto", "reference", "chunked")

Tensors = tuple[Tensor, ...]
#: Inputs may be left out where a recurrence has a cheaper form without them.
Inputs = tuple[Tensor | None, ...]


class Rounds(NamedTuple):
    """The chunks of a segment: round i holds one chunk of each of the first counts[i] sequences.

    empty: [chunks, C], places that hold no token; None if all do. Inputs are zero there.
    """

    counts: list[int]
    empty: Tensor | None

    def parts(self, heads: int) -> list[slice]:
        """The rows of each round in tensors [chunks * heads, ...]."""
        ends = [0]
        for count in self.counts:
            ends.append(ends[-1] + count * heads)
        return [slice(begin, end) for begin, end in zip(ends, ends[1:])]


class Recurrence:
    """Subclasses are frozen dataclasses of their options."""

    #: Tokens per chunk.
    chunk: int = 64
    #: How many of the states, the first ones, `backward` has to have from every segment. The others
    #: are kept once for all.
    changing: ClassVar[int | None] = None

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

        `state` is as `forward` had it, but for those that do not change (see `changing`), which
        are as before the first segment.
        """
        raise NotImplementedError


def run(
    recurrence: Recurrence,
    inputs: Inputs,
    state: Tensors,
    *,
    cu_seqlens: Tensor | None = None,
    offsets: list[int] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensors]:
    """y [B, T, heads, width] and the final states, in the dtype of `state`.

    inputs: [B, T, heads, ...] each, B = 1 with cu_seqlens. state: [N, ...] each, of the dtype that
    is computed in. offsets: for recurrences over mini-batches, how many tokens of the mini-batch
    under way each sequence has read.
    """
    checks.choice("backend", backend, BACKENDS)
    first = inputs[0]
    assert first is not None
    if _chosen(backend, first.shape[1], cu_seqlens) == "reference":
        return _run_reference(recurrence, inputs, state, cu_seqlens)
    return _run_chunked(recurrence, inputs, state, cu_seqlens, offsets)


def _chosen(backend: str, tokens: int, cu_seqlens: Tensor | None) -> str:
    """The backend to run. "auto" asks the environment variable TRELLIS_BACKEND first."""
    named = backend
    if backend == "auto":
        backend = asked_backend()
    if backend == "triton":
        raise NotImplementedError(
            f"{VARIABLE}='triton' is not part of this version; use 'auto', 'native', 'chunked' or "
            "'reference'"
        )
    if backend == "reference":
        return "reference"
    if under_transform():  # which a backward of our own would be opaque to
        if named == "chunked":
            raise RuntimeError(
                "backend='chunked' cannot run inside torch.func or forward-mode differentiation; "
                "use 'auto' or 'reference'"
            )
        return "reference"
    if backend != "chunked" and tokens == 1 and cu_seqlens is None:
        return "reference"  # a decoding step: nothing to put in chunks
    return "chunked"


@uncompiled
def _run_chunked(
    recurrence: Recurrence,
    inputs: Inputs,
    state: Tensors,
    cu_seqlens: Tensor | None,
    offsets: list[int] | None,
) -> tuple[Tensor, Tensors]:
    first = inputs[0]
    assert first is not None
    batch, tokens = first.shape[:2]
    layout = ChunkLayout.of(batch, tokens, cu_seqlens, recurrence.chunk, first.device, offsets)
    graded = torch.is_grad_enabled()  # which inside of an autograd.Function is always off
    y, *final = _Chunked.apply(recurrence, layout, graded, len(inputs), *inputs, *state)
    return y, tuple(final)


def _run_reference(
    recurrence: Recurrence, inputs: Inputs, state: Tensors, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensors]:
    first = inputs[0]
    assert first is not None
    with no_autocast(first.device):
        inputs = tuple(None if x is None else x.to(state[0].dtype) for x in inputs)
        if cu_seqlens is None:
            return recurrence.reference(inputs, state)
        bounds = checks.bounds(cu_seqlens, first.shape[1])
        if len(bounds) == 1:  # a pack of nothing
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


class _Segment(NamedTuple):
    rows: ChunkRows
    rounds: Rounds


def _segments(layout: ChunkLayout) -> list[tuple[int, int]]:
    """(first, stop) of the rounds of every segment. On meta there is nothing to compute."""
    found, first = [], 0
    while first < layout.chunks and layout.device.type != "meta":
        tokens = max(SEGMENT_LEAST, SEGMENT_TOKENS // layout.active(first))
        rounds = max(1, tokens // layout.chunk)
        stop = min(first + rounds, layout.chunks)
        found.append((first, stop))
        first = stop
    return found


def _segment(layout: ChunkLayout, first: int, stop: int) -> _Segment:
    rows = layout.segment_rows(first, stop)
    return _Segment(rows, Rounds([layout.active(i) for i in range(first, stop)], rows.empty))


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
        inputs = tensors[:count]
        state = tuple(_sorted(layout, s) for s in tensors[count:] if s is not None)
        dtype = state[0].dtype
        flat = _flat(inputs)
        assert flat[0] is not None
        assert inputs[0] is not None
        y = flat[0].new_empty(flat[0].shape[0], *recurrence.output(inputs), dtype=dtype)
        kept: list[Tensor] = []
        keep = graded and any(ctx.needs_input_grad)
        with no_autocast(layout.device):
            for first, stop in _segments(layout):
                rows, rounds = _segment(layout, first, stop)
                before = tuple(s[: rounds.counts[0]] for s in state)
                if keep:
                    kept += before[: recurrence.changing] if kept else before
                out, after = recurrence.forward(_taken(rows, flat, dtype), before, rounds)
                rows.put(y, out)
                state = tuple(replaced(old, new) for old, new in zip(state, after))
        ctx.save_for_backward(*inputs, *kept)
        ctx.setting = recurrence, layout, count
        return y.view(*inputs[0].shape[:2], *y.shape[1:]), *(layout.unsort(s) for s in state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *dfinal: Tensor) -> tuple[Any, ...]:
        recurrence, layout, count = ctx.setting
        tensors = ctx.saved_tensors  # asked for once: activation checkpointing allows no more
        inputs, kept = tensors[:count], list(tensors[count:])
        flat = _flat(inputs)
        grads = [None if x is None else torch.empty_like(x) for x in flat]
        dy = dy.flatten(0, 1)
        dstate = tuple(_sorted(layout, d) for d in dfinal)
        dtype = dstate[0].dtype
        changing = len(dstate) if recurrence.changing is None else recurrence.changing
        constant = kept[changing : len(dstate)]
        del kept[changing : len(dstate)]
        with no_autocast(layout.device):
            for first, stop in reversed(_segments(layout)):
                rows, rounds = _segment(layout, first, stop)
                n = rounds.counts[0]
                state = (*kept[-changing:], *(s[:n] for s in constant))
                del kept[-changing:]
                dinputs, before = recurrence.backward(
                    _taken(rows, flat, dtype), state, rounds,
                    rows.take(dy, dtype), tuple(d[:n] for d in dstate),
                )  # fmt: skip
                for whole, part in zip(grads, dinputs):
                    if whole is not None and part is not None:
                        rows.put(whole, part)
                dstate = tuple(replaced(old, new) for old, new in zip(dstate, before))
        shaped = (None if g is None else g.view_as(x) for g, x in zip(grads, inputs))
        return None, None, None, None, *shaped, *(layout.unsort(d) for d in dstate)


def _sorted(layout: ChunkLayout, state: Tensor) -> Tensor:
    """Not a copy where none is needed: what is kept is then what the caller has."""
    return state if layout.in_order else layout.sort(state)


def _flat(inputs: Sequence[Tensor | None]) -> Inputs:
    """One axis of tokens, contiguous."""
    return tuple(None if x is None else x.flatten(0, 1).contiguous() for x in inputs)


def _taken(rows: ChunkRows, flat: Inputs, dtype: torch.dtype) -> Inputs:
    return tuple(None if x is None else rows.take(x, dtype) for x in flat)


def replaced(old: Tensor, new: Tensor) -> Tensor:
    """The first rows of `old` exchanged for `new`."""
    return new if len(new) == len(old) else torch.cat([new, old[len(new) :]])
