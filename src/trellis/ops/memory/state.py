"""What a memory carries from one call to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PassState(NamedTuple):
    """State of one pass: the memory, and what stale mode needs to go on inside a mini-batch.

    memory: [N, H, M, D], fp32 (fp64 for fp64 inputs).
    anchor: [N, H, M, D], the memory at the start of the mini-batch under way; None in exact mode.
    offset: [N], integer, tokens of that mini-batch already read; None in exact mode.
    """

    memory: Tensor
    anchor: Tensor | None = None
    offset: Tensor | None = None

    def select(self, which: slice) -> PassState:
        """Some of the sequences."""
        anchor, offset = self.anchor, self.offset
        return PassState(
            self.memory[which],
            None if anchor is None else anchor[which],
            None if offset is None else offset[which],
        )

    @staticmethod
    def cat(states: Sequence[PassState]) -> PassState:
        """The sequences of all states, one after the other."""
        anchors = [s.anchor for s in states if s.anchor is not None]
        offsets = [s.offset for s in states if s.offset is not None]
        return PassState(
            torch.cat([s.memory for s in states]),
            torch.cat(anchors) if anchors else None,
            torch.cat(offsets) if offsets else None,
        )


def anchored(memory: Tensor, anchor: Tensor, offset: Tensor) -> Tensor:
    """The anchor in use: the memory itself where a mini-batch is about to start."""
    return torch.where(offset.eq(0)[:, None, None, None], memory, anchor)


def move_on(memory: Tensor, anchor: Tensor, offset: Tensor, minibatch: int) -> PassState:
    """The state in stale mode after reading up to `offset`, which may pass the mini-batch's end."""
    offset = offset.remainder(minibatch)
    return PassState(memory, anchored(memory, anchor, offset), offset)


class MemoryState(NamedTuple):
    """State of the two-pass memory. `offset` is shared by both passes; see PassState.

    keys: [N, H, M, K]; values: [N, H, M, V], or [N, H, V, M] with value_pass="decode".
    """

    keys: Tensor
    values: Tensor
    key_anchor: Tensor | None = None
    value_anchor: Tensor | None = None
    offset: Tensor | None = None

    @property
    def key_pass(self) -> PassState:
        return PassState(self.keys, self.key_anchor, self.offset)

    @property
    def value_pass(self) -> PassState:
        return PassState(self.values, self.value_anchor, self.offset)

    @staticmethod
    def join(key_pass: PassState, value_pass: PassState) -> MemoryState:
        return MemoryState(
            key_pass.memory, value_pass.memory, key_pass.anchor, value_pass.anchor, key_pass.offset
        )
