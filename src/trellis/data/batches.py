"""Batches as pure functions of (seed, step).

The global batch of a step is `rows` rows of `context` tokens. Processes take slices of the rows, or
parts of every row; any step can be made again, by any number of processes, from these alone.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .shuffle import mix, mixed_range, shuffled

IGNORED = -100
KINDS = ("packed", "contiguous")


class Stream(Protocol):
    """Documents, joined. `ends` holds where each ends, in tokens from the stream's beginning."""

    @property
    def tokens(self) -> int: ...

    @property
    def ends(self) -> np.ndarray: ...

    def read(self, start: int, stop: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Batch:
    """Some rows of a global batch, or parts of them.

    input_ids, targets: [R, T]; targets are -100 where the next token is of another document.
    cu_seqlens: bounds of the sequences in the rows joined, [N + 1]; None: each row is one sequence.
    first, last: [R], the sequences that each row begins and ends with.
    goes_on: [R], whether the first one goes on from what the row held before (the step before, or
        the part before in the same row).
    predicted: targets of the whole global batch, for the mean over it.
    """

    input_ids: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None
    first: Tensor
    last: Tensor
    goes_on: Tensor
    predicted: int

    def to(self, device: torch.device) -> Batch:
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **moved)

    def model_inputs(self) -> dict[str, Any]:
        """As the model takes them: rows of several sequences are one pack."""
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

    packed: the stream is cut into windows of `context` tokens, read in a shuffled order that
        differs from epoch to epoch, as does where the first cut falls. Documents meet inside a
        window; each is a sequence of its own.
    contiguous: documents in a shuffled order are joined and laid on `rows` lanes. Step after step,
        each row goes on where it stopped, so that a document's state can be carried along.
    """

    def __init__(self, stream: Stream, *, kind: str, context: int, rows: int, seed: int):
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
        self.stream, self.kind = stream, kind
        self.context, self.rows, self.seed = context, rows, seed
        needed = (context if kind == "packed" else context * rows) + 1
        if stream.tokens < needed:
            raise ValueError(
                f"the data has {stream.tokens} tokens, but {kind} batches of {rows} x {context} "
                f"need at least {needed}: take a shorter context, fewer rows or more text"
            )
        if kind == "packed":
            #: Windows per epoch, which leave room to move the first cut where there is any.
            self.windows = max((stream.tokens - context) // context, 1)
        else:
            self.lane = (stream.tokens - 1) // rows
            self.windows = self.lane // context * rows
        self._order: _Reordered | None = None
        self._plan: tuple[int, list[tuple[Stream, int]], int] | None = None

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
        """Rows of the batch of a step, all by default.

        part: (index, count) takes that part of every row, of equal parts. cut: starts a new
        sequence at every multiple of so many tokens of a row (the context's warm-up).
        """
        places, predicted = self._planned(step)
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

    def _planned(self, step: int) -> tuple[list[tuple[Stream, int]], int]:
        """Where all rows of a step begin, and their targets; kept for its other micro-batches."""
        if self._plan is None or self._plan[0] != step:
            places = [self._place(step, row) for row in range(self.rows)]
            predicted = sum(self.context - self._ends_in(*place) for place in places)
            self._plan = step, places, predicted
        return self._plan[1:]

    def _place(self, step: int, row: int) -> tuple[Stream, int]:
        """The stream of a row, and where the row begins in it."""
        if self.kind == "packed":
            number = step * self.rows + row
            epoch, index = divmod(number, self.windows)
            window = shuffled(index, self.windows, mix(self.seed, epoch))
            spare = self.stream.tokens - 1 - self.windows * self.context
            offset = mix(self.seed, epoch, 1) % (spare + 1)
            return self.stream, offset + window * self.context
        steps = self.windows // self.rows
        epoch, index = divmod(step, steps)
        if self._order is None or self._order.epoch != epoch:
            self._order = _Reordered(self.stream, self.seed, epoch)
        return self._order, row * self.lane + index * self.context

    def _goes_on(self, step: int, stream: Stream, start: int, begin: int, cut: int | None) -> bool:
        """Whether the token at `start`, place `begin` of its row, continues its document here."""
        if cut is not None and begin % cut == 0:
            return False
        carried = self.kind == "contiguous" and step % (self.windows // self.rows) > 0
        if begin == 0 and not carried:
            return False
        return len(_between(stream.ends, start - 1, start)) == 0

    def _ends_in(self, stream: Stream, start: int) -> int:
        return len(_between(stream.ends, start, start + self.context))


def assemble(
    places: list[tuple[Stream, int]],
    length: int,
    cuts: list[int] | None = None,
    goes_on: list[bool] | None = None,
    predicted: int | None = None,
) -> Batch:
    """Rows of `length` tokens from places in streams, cut where documents begin and at `cuts`."""
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
    """A stream's documents in the shuffled order of an epoch."""

    def __init__(self, stream: Stream, seed: int, epoch: int):
        self.stream, self.epoch, self.tokens = stream, epoch, stream.tokens
        ends = np.asarray(stream.ends, dtype=np.int64)
        begins = np.concatenate([[0], ends[:-1]])
        order = np.argsort(mixed_range(len(ends), mix(seed, epoch)), kind="stable")
        self.begins = begins[order]
        self.ends = np.cumsum((ends - begins)[order])

    def read(self, start: int, stop: int) -> np.ndarray:
        parts = []
        document = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            end = min(int(self.ends[document]), stop)
            length = int(self.ends[document]) - (int(self.ends[document - 1]) if document else 0)
            inside = start - (int(self.ends[document]) - length)
            begin = int(self.begins[document]) + inside
            parts.append(self.stream.read(begin, begin + end - start))
            start, document = end, document + 1
        return np.concatenate(parts)


def _between(ends: np.ndarray, low: int, high: int) -> np.ndarray:
    """The ends e with low < e <= high."""
    # Of the same type: numpy would otherwise convert all ends, and to floats.
    begin, stop = np.searchsorted(ends, np.array([low, high], dtype=ends.dtype), side="right")
    return np.asarray(ends[begin:stop], dtype=np.int64)


def validation_windows(stream: Stream, context: int, tokens: int) -> list[int]:
    """Where windows of `context` tokens begin that cover about `tokens` of a stream, evenly."""
    whole = max((stream.tokens - 1) // context, 1)
    count = min(whole, max(1, tokens // context))
    return [index * whole // count * context for index in range(count)]
