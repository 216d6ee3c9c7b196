"""States that some sequences of a batch go on from: across training steps, or across processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mixers.base import State, map_tensors


class Carried(NamedTuple):
    """A layer's states for the rows of a batch, whose rows may hold several sequences each.

    rows: the state of every row. first [R]: the sequence that each row begins with.
    goes_on [R]: whether that sequence goes on from the row's state; all others start afresh.
    sequences: how many there are in all.
    """

    rows: State
    first: Tensor
    goes_on: Tensor
    sequences: int

    def fill(self, fresh: State) -> State:
        """The states of all sequences, from those of as many that start afresh."""
        if fresh is None:
            return None
        if not isinstance(fresh, Tensor):
            parts = (self._replace(rows=part).fill(new) for part, new in zip(self.rows, fresh))
            return type(fresh)(*parts)
        rows = self.rows
        fresh = aligned(fresh, rows.shape[1:])
        goes_on = self.goes_on.view(-1, *[1] * (fresh.dim() - 1))
        chosen = torch.where(goes_on, rows.to(fresh.dtype), fresh[self.first])
        return fresh.index_copy(0, self.first, chosen)


def aligned(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A state's tensor [N, ...] as [N, *shape]: a cache that grows has its newest tokens last, so
    zeros go in front."""
    missing = [wanted - have for wanted, have in zip(shape, tensor.shape[1:])]
    if not any(missing):
        return tensor
    return F.pad(tensor, [x for size in reversed(missing) for x in (size, 0)])


def select(state: State, sequences: Tensor) -> State:
    """The states of some sequences."""
    return map_tensors(lambda tensor: tensor.index_select(0, sequences), state)


class Relay(Protocol):
    """Hands states into and out of every layer while a model reads."""

    def before(self, layer: int) -> State | Carried | None:
        """What the layer starts from; None: all sequences afresh."""

    def after(self, layer: int, state: State, x: Tensor) -> Tensor:
        """Takes the layer's final states. Returns its output x, perhaps with a hook on it."""
