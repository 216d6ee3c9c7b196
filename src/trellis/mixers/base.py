"""The interface of every mixer, and the checks that their configurations share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

__all__ = [
    "Mixer",
    "State",
    "at_least",
    "check_streams",
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


def check_streams(name: str, value: Sequence[str]) -> tuple[str, ...]:
    streams = tuple(value)
    if isinstance(value, str) or not set(streams) <= {"q", "k", "v"}:
        raise ValueError(f"{name} must be a list of some of 'q', 'k' and 'v'; got {value!r}")
    return streams


def at_least(
    name: str, value: float | None, least: float, *, whole: bool = True, optional: bool = False
) -> None:
    """optional: None is accepted."""
    if optional and value is None:
        return
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not number or value is None or not value >= least or math.isinf(value):
        kind = "whole number" if whole else "number"
        raise ValueError(f"{name} must be a {kind} of at least {least}; got {value!r}")


def bounds(
    name: str, value: object, least: float, *, open_end: bool = False
) -> tuple[float, float]:
    """(low, high) with least < low <= high (least <= low with `open_end`), both finite."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else ()
    numbers = len(pair) == 2 and all(isinstance(x, (int, float)) and math.isfinite(x) for x in pair)
    if not numbers or not (pair[0] >= least if open_end else pair[0] > least) or pair[0] > pair[1]:
        sign = "<=" if open_end else "<"
        raise ValueError(f"{name} must be a range {least:g} {sign} low <= high; got {value!r}")
    return pair[0], pair[1]


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false; got {value!r}")


def positive(name: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name} must be a number above 0; got {value!r}")


def head_size(dim: int, heads: int) -> int:
    at_least("heads", heads, 1)
    if dim % heads:
        raise ValueError(f"heads must divide the width, {dim}; got {heads}")
    return dim // heads


def even_head_size(size: int) -> None:
    if size % 2:
        raise ValueError(f"rotary positions need an even head size; got {size}")
