"""The interface of every mixer, and the checks that their configurations share."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import checks

__all__ = [
    "Mixer",
    "State",
    "even_head_size",
    "head_size",
    "names_without_weight_decay",
]

#: A NamedTuple of tensors, of None and of further such tuples. The first dimension of every
#: tensor counts sequences, so that a cache can select, repeat and save states of any mixer.
State = Any


class Mixer(nn.Module):
    """Mixes tokens along the sequence. One state per sequence lets it go on where it stopped.

    `forward(x)` equals `forward(x, init_state(batch))`; feeding a sequence in pieces, each with
    the state that the one before returned, equals feeding it whole.
    """

    def forward(
        self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """x [B, T, dim] -> (y [B, T, dim], state of B sequences).

        With cu_seqlens [N+1], x is one row [1, T, dim] of N packed sequences, and the states
        in and out are of N sequences. Mixers never see padding.
        """
        raise NotImplementedError

    def init_state(self, batch: int) -> State:
        """The state of `batch` sequences before their first token."""
        raise NotImplementedError

    def state_size(self, tokens: int | None = None) -> float:
        """Numbers that the state of one sequence holds after `tokens` tokens.

        None asks for the bound over any number of tokens; it is math.inf where there is none.
        """
        raise NotImplementedError

    def flops(self, context: int) -> float:
        """Operations per token of the mixing itself, forward, on average over `context` tokens.

        A multiply-add counts as two; linear maps of the width are not included. It is the cost of
        the recurrence as defined, whichever algorithm computes it.
        """
        raise NotImplementedError


def names_without_weight_decay(module: nn.Module) -> set[str]:
    """Names of the parameters that their modules exempt from weight decay, at any depth."""
    return {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name in getattr(part, "no_weight_decay", ())
    }


def head_size(dim: int, heads: int) -> int:
    checks.at_least("heads", heads, 1)
    if dim % heads:
        raise ValueError(f"heads must divide the width, {dim}; got {heads}")
    return dim // heads


def even_head_size(size: int) -> None:
    if size % 2:
        raise ValueError(f"rotary positions need an even head size; got {size}")
