"""Batches of tokens, as pure functions of (seed, step).

The global batch of a step is `rows` rows of `context` tokens. A process takes some of the rows, or
a part of every row. The batch of any step can be made again, by any number of processes.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .. import checks
from ..ops.cross_entropy import IGNORED
from .shuffle import mix, mixed_range, shuffled

KINDS = ("packed", "contiguous")


class Stream(Protocol):
    """Documents joined to one stream of tokens. `ends` says after how many tokens each one ends."""

    @property
    def tokens(self) -> int: ...

    @property
    def ends(self) -> np.ndarray: ...

    def read(self, start: int, stop: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Batch:
    """Some rows of a global batch, or parts of them.

    input_ids, targets: [R, T]. A target is -100 where the next token belongs to another document.
    cu_seqlens: [N + 1], the bounds of the N sequences in the joined rows; None if each row is one.
    first, last: [R], the number of the sequence that each row begins with and ends with.
    goes_on: [R], whether a row's first sequence continues the one that the row ended with before:
        in the step before, or in the part before it. Training hands that one's state on.
    predicted: the number of targets in the whole global batch, for the mean loss.
    """

    input_ids: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None
    first: Tensor
    last: Tensor
    goes_on: Tensor
    predicted: int

    def to(self, device: torch.device) -> Batch:
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        moved: Any = {name: x.to(device, non_blocking=True) for name, x in tensors.items()}
        return dataclasses.replace(self, **moved)

    def model_inputs(self) -> dict[str, Any]:
        """Arguments of the model. Rows of several sequences are joined to one packed row."""
        packed = self.cu_seqlens is not None
        return {
            "input_ids": self.input_ids.reshape(1, -1) if packed else self.input_ids,
            "targets": self.targets.reshape(1, -1) if packed else self.targets,
            "cu_seqlens": self.cu_seqlens,
        }

    @property
    def sequences(self) -> int:
        return len(self.first) if self.cu_seqlens is None else len(self.cu_seqlens) - 1


class Batches:
    """Packed or contiguous batches of a token stream.

    packed: every row is a window of `context` tokens. Each epoch reads the windows in another
        shuffled order and begins the first one at another token. Where documents meet inside a
        window, each is a sequence of its own.
    contiguous: documents are joined in a shuffled order and dealt out to the rows in equal shares.
        At every step each row reads on where it stopped, so that a state can be handed on.
    """

    def __init__(self, stream: Stream, *, kind: str, context: int, rows: int, seed: int):
        checks.choice("kind", kind, KINDS)
        self.stream, self.kind = stream, kind
        self.context, self.rows, self.seed = context, rows, seed
        needed = (context if kind == "packed" else context * rows) + 1
        if stream.tokens < needed:
            raise ValueError(
                f"the data has {stream.tokens} tokens, but {kind} batches of {rows} x {context} "
                f"need at least {needed}: take a shorter context, fewer rows or more text"
            )
        if kind == "packed":
            #: Windows per epoch. They leave room to begin the first one at another token.
            self.windows = max((stream.tokens - context) // context, 1)
        else:
            self._row_tokens = (stream.tokens - 1) // rows
            self.windows = self._row_tokens // context * rows
        # Kept for the next micro-batch, which asks for the same step and epoch.
        self._places = functools.lru_cache(maxsize=1)(self._find_places)
        self._reordered = functools.lru_cache(maxsize=1)(
            functools.partial(_Reordered, stream, seed)
        )

    @property
    def steps_per_epoch(self) -> float:
        return self.windows / self.rows

    def batch(
        self,
        step: int,
        rows: range | None = None,
        part: tuple[int, int] = (0, 1),
        cut: int | None = None,
    ) -> Batch:
        """The batch of a step, or some of its rows.

        part: (index, count) divides every row into `count` equal parts and takes one of them.
        cut: a new sequence begins after every `cut` tokens of a row (while the context warms up).
        """
        places, predicted = self._places(step)
        index, parts = part
        length = self.context // parts
        begin = index * length
        chosen = [places[row] for row in (range(self.rows) if rows is None else rows)]
        return assemble(
            [(stream, start + begin) for stream, start in chosen],
            length,
            [] if cut is None else [x - begin for x in range(0, self.context, cut)],
            [self._goes_on(step, stream, start + begin, begin, cut) for stream, start in chosen],
            predicted,
        )

    def _find_places(self, step: int) -> tuple[list[tuple[Stream, int]], int]:
        """Where all rows of a step begin, and how many targets they have."""
        places = [self._place(step, row) for row in range(self.rows)]
        ends = sum(len(_between(s.ends, start, start + self.context)) for s, start in places)
        return places, self.rows * self.context - ends

    def _place(self, step: int, row: int) -> tuple[Stream, int]:
        """The stream that a row of a step reads, and where in it the row begins."""
        if self.kind == "packed":
            number = step * self.rows + row
            epoch, index = divmod(number, self.windows)
            window = shuffled(index, self.windows, mix(self.seed, epoch))
            spare = self.stream.tokens - 1 - self.windows * self.context
            offset = mix(self.seed, epoch, 1) % (spare + 1)
            return self.stream, offset + window * self.context
        epoch, index = divmod(step, self.windows // self.rows)
        return self._reordered(epoch), row * self._row_tokens + index * self.context

    def _goes_on(self, step: int, stream: Stream, start: int, begin: int, cut: int | None) -> bool:
        """Whether the token at `start`, token `begin` of its row, continues a sequence there."""
        if cut is not None and begin % cut == 0:
            return False
        reads_on = self.kind == "contiguous" and step % (self.windows // self.rows) > 0
        if begin == 0 and not reads_on:
            return False
        return len(_between(stream.ends, start - 1, start)) == 0


def assemble(
    places: list[tuple[Stream, int]],
    length: int,
    cuts: list[int] | None = None,
    goes_on: list[bool] | None = None,
    predicted: int | None = None,
) -> Batch:
    """Rows of `length` tokens that begin at places in streams.

    A sequence begins where a document begins, and at each of `cuts` (tokens of a row).
    """
    ids = np.empty((len(places), length + 1), dtype=np.int64)
    targets = np.empty((len(places), length), dtype=np.int64)
    bounds, first, last = [0], [], []
    inner = {x for x in cuts or () if 0 < x < length}
    for i, (stream, start) in enumerate(places):
        ids[i] = stream.read(start, start + length + 1)
        targets[i] = ids[i, 1:]
        ends = _between(stream.ends, start, start + length) - start
        targets[i, ends - 1] = IGNORED
        first.append(len(bounds) - 1)
        starts = (set(ends.tolist()) | inner) - {length}
        bounds += [i * length + x for x in sorted(starts)] + [(i + 1) * length]
        last.append(len(bounds) - 2)
    whole = len(bounds) == len(places) + 1
    if predicted is None:
        predicted = int((targets != IGNORED).sum())
    return Batch(
        input_ids=torch.from_numpy(ids[:, :-1].copy()),
        targets=torch.from_numpy(targets),
        cu_seqlens=None if whole else torch.tensor(bounds),
        first=torch.tensor(first),
        last=torch.tensor(last),
        goes_on=torch.tensor(goes_on or [False] * len(places)),
        predicted=predicted,
    )


class _Reordered:
    """The documents of a stream in the shuffled order of an epoch, joined to another stream."""

    def __init__(self, stream: Stream, seed: int, epoch: int):
        self.stream, self.tokens = stream, stream.tokens
        ends = np.asarray(stream.ends, dtype=np.int64)
        lengths = np.diff(ends, prepend=0)
        order = np.argsort(mixed_range(len(ends), mix(seed, epoch)), kind="stable")
        self.ends = np.cumsum(lengths[order])
        #: How much further back or ahead each document stands in the original stream.
        self.shifts = ends[order] - self.ends

    def read(self, start: int, stop: int) -> np.ndarray:
        parts = []
        document = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            end, shift = min(int(self.ends[document]), stop), int(self.shifts[document])
            parts.append(self.stream.read(start + shift, end + shift))
            start, document = end, document + 1
        return np.concatenate(parts)


def _between(ends: np.ndarray, low: int, high: int) -> np.ndarray:
    """The ends e with low < e <= high."""
    # The bounds get the type of the ends, or numpy would convert all ends to floats.
    begin, stop = np.searchsorted(ends, np.array([low, high], dtype=ends.dtype), side="right")
    return np.asarray(ends[begin:stop], dtype=np.int64)


def validation_windows(stream: Stream, context: int, tokens: int) -> list[int]:
    """The first tokens of windows that lie evenly over a stream and have `tokens` tokens in all."""
    whole = max((stream.tokens - 1) // context, 1)
    count = min(whole, max(1, tokens // context))
    return [index * whole // count * context for index in range(count)]
