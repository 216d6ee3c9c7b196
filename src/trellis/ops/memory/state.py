"""What a memory carries from one call to the next."""

from __future__ import annotations

from typing import NamedTuple

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
