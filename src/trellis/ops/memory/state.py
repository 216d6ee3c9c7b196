"""What a memory carries from one call to the next, and what every backend gets of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks


class PassState(NamedTuple):
    """State of one pass: the memory, and what stale mode needs to go on inside a mini-batch.

    memory: [N, H, M, D], fp32 (fp64 for fp64 inputs).
    anchor: [N, H, M, D], the memory at the start of the mini-batch under way; None in exact mode.
    offset: [N], integer, tokens of that mini-batch already read; None in exact mode.
    """

    memory: Tensor
    anchor: Tensor | None = None
    offset: Tensor | None = None

    def checked(
        self, name: str, expected: Sequence[int], minibatch: int, dtype: torch.dtype
    ) -> PassState:
        """The same in the dtype of the computation; in stale mode with an anchor and an offset.

        name: what errors call the memory. expected: its shape. minibatch: 1 in exact mode.
        """
        memory, anchor, offset = self
        checks.floats(**{name: memory})
        checks.shape(name, memory, expected, "[N,H,M,D]")
        memory = memory.to(dtype)
        if minibatch == 1:
            return PassState(memory)
        if (offset is None) != (anchor is None):
            raise ValueError(f"{name}: anchor and offset must be given together; one is missing")
        if offset is None or anchor is None:
            offset = torch.zeros(expected[0], dtype=torch.long, device=memory.device)
            return PassState(memory, memory, offset)
        checks.shape(f"{name} offset", offset, expected[:1], "[N]")
        if offset.device.type == "cpu" and not torch.compiler.is_compiling():
            checks.offsets(offset, minibatch)  # on a GPU this would wait for the device
        checks.shape(f"{name} anchor", anchor, expected, "[N,H,M,D]")
        return PassState(memory, anchor.to(dtype), offset)

    def moved_on(self, read: int | Tensor, minibatch: int) -> Tensor:
        """The offset in stale mode after `read` more tokens, a number or [N]."""
        assert self.offset is not None
        return (self.offset + read).remainder(minibatch)


def anchored(memory: Tensor, anchor: Tensor, offset: Tensor) -> Tensor:
    """The anchor in use: the memory itself where a mini-batch is about to start."""
    return torch.where(offset.eq(0)[:, None, None, None], memory, anchor)


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


class Pass(NamedTuple):
    """One pass of a call, but for its query.

    x: [B, T, H, D], what is written. target: [B, T, H, M]. log_decay, step_size: [B, T, H].
    start: the state to start from, with an anchor and an offset exactly in stale mode. Where the
        offset is 0, the anchor is not read.
    """

    x: Tensor
    target: Tensor
    log_decay: Tensor
    step_size: Tensor
    phi: str
    transposed: bool
    start: PassState


class Call(NamedTuple):
    """A call of `trellis_memory` whose arguments have been checked.

    minibatch: 1 in exact mode. error_at: "before" or "after" the token's decay. recompute: keep the
    inputs alone for the backward (backends that have the choice).
    """

    q: Tensor
    keys: Pass
    values: Pass
    f: str
    psi: str
    minibatch: int
    error_at: str
    cu_seqlens: Tensor | None
    recompute: bool = False

    @property
    def read(self) -> int | Tensor:
        """How many tokens the call reads of each sequence: a number, or [N]."""
        return tokens_read(self.q, self.cu_seqlens)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that the memory reads of the tokens, [B, T, H, ...] each."""
        return (self.q, *self.keys[:4], *self.values[:4])


def tokens_read(x: Tensor, cu_seqlens: Tensor | None) -> int | Tensor:
    """How many tokens x [B, T, ...] holds of each sequence: a number, or [N] for a pack."""
    return x.shape[1] if cu_seqlens is None else cu_seqlens.diff()
