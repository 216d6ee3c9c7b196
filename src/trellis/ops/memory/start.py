"""Where a pass starts: the mode, and the state in the form that every backend takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import checks
from .state import PassState, anchored

MODES = ("exact", "stale")
VALUE_PASSES = ("encode", "decode")


def effective_minibatch(mode: str, minibatch: int) -> int:
    """1 for exact mode: a mini-batch of one token is the exact recurrence."""
    checks.choice("mode", mode, MODES)
    if not isinstance(minibatch, int) or isinstance(minibatch, bool) or minibatch < 1:
        raise ValueError(f"minibatch must be a whole number of at least 1; got {minibatch!r}")
    return minibatch if mode == "stale" else 1


def pass_state(
    name: str, state: PassState, expected: Sequence[int], minibatch: int, dtype: torch.dtype
) -> PassState:
    """The state in the dtype of the computation, with an anchor and an offset in stale mode."""
    checks.floats(**{name: state.memory})
    checks.shape(name, state.memory, expected, "[N,H,M,D]")
    memory = state.memory.to(dtype)
    if minibatch == 1:
        return PassState(memory)
    offset = state.offset
    if (offset is None) != (state.anchor is None):
        raise ValueError(f"{name}: anchor and offset must be given together; one is missing")
    if offset is None:
        offset = torch.zeros(expected[0], dtype=torch.long, device=memory.device)
        return PassState(memory, memory, offset)
    checks.shape(f"{name} offset", offset, expected[:1], "[N]")
    if offset.device.type == "cpu" and not torch.compiler.is_compiling():
        checks.offsets(offset, minibatch)  # elsewhere reading it would wait for the device
    assert state.anchor is not None
    checks.shape(f"{name} anchor", state.anchor, expected, "[N,H,M,D]")
    return PassState(memory, anchored(memory, state.anchor.to(dtype), offset), offset)
