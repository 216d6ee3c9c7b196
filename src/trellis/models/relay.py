"""The relay: hands each layer the states that it starts from, and takes its final states.

A model calls the relay that it is given before and after every layer. `trellis.training.relay` has
the two relays of training: from step to step, and from process to process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mixers.base import State, map_tensors


class RelayedStates(NamedTuple):
    """The states of one layer that a relay hands to the R rows of a batch.

    A row may hold several sequences (documents). Its first sequence may go on from the row's
    state; the others start with fresh states.

    rows: the state of every row. first [R]: the index of the sequence that each row begins with.
    goes_on [R]: whether that sequence goes on from the row's state.
    sequences: the number of sequences in all rows together.
    """

    rows: State
    first: Tensor
    goes_on: Tensor
    sequences: int

    def fill(self, fresh: State) -> State:
        """The states of all sequences: `fresh` ones, replaced where a sequence goes on."""
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
    """A tensor [N, ...] of a state as [N, *shape], with zeros in front of what is there.

    Only attention's caches differ in shape, and they have their newest tokens last.
    """
    missing = [wanted - have for wanted, have in zip(shape, tensor.shape[1:])]
    if not any(missing):
        return tensor
    return F.pad(tensor, [x for size in reversed(missing) for x in (size, 0)])


def select(state: State, sequences: Tensor) -> State:
    """The states of the sequences with these indices."""
    return map_tensors(lambda tensor: tensor.index_select(0, sequences), state)


class Relay(Protocol):
    """Hands states into and out of every layer while a model reads a batch."""

    def before(self, layer: int) -> State | RelayedStates | None:
        """The states that the layer starts from; None lets all sequences start afresh."""

    def after(self, layer: int, state: State, x: Tensor) -> Tensor:
        """Takes the layer's final states. Returns its output x, perhaps with a hook on it."""
