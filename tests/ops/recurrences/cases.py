"""The recurrences that the common suite runs over. Each op's cases are in a file of its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes that are all different, so that a transposed product shows. `lengths` makes a pack."""

    batch: int = 2
    tokens: int = 20
    heads: int = 2
    key: int = 12
    value: int = 10
    slots: int = 7
    lengths: tuple[int, ...] | None = None
    seed: int = 0

    @property
    def lead(self) -> tuple[int, int, int]:
        """B, T, H"""
        if self.lengths is not None:
            return 1, sum(self.lengths), self.heads
        return self.batch, self.tokens, self.heads

    @property
    def sequences(self) -> int:
        return self.batch if self.lengths is None else len(self.lengths)

    @property
    def cu_seqlens(self) -> Tensor | None:
        if self.lengths is None:
            return None
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def draw(self) -> Draw:
        return Draw(self.seed)


class Draw:
    """Random tensors in fp64."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def unit(self, *shape: int) -> Tensor:
        x = self.normal(*shape)
        return x / x.norm(dim=-1, keepdim=True)


@dataclasses.dataclass
class Case:
    """A problem: its tensors, and the op on them.

    over_tokens: inputs [B, T, ...]. states: initial states [N, ...]. call(inputs, states,
    cu_seqlens, backend) returns y and the final states, named as the initial ones. What no token
    changes, such as a parameter, is among the initial states only.
    """

    over_tokens: dict[str, Tensor]
    states: dict[str, Tensor]
    call: Callable[
        [dict[str, Tensor], dict[str, Tensor], Tensor | None, str],
        tuple[Tensor, dict[str, Tensor]],
    ]


def every_case() -> dict[str, Callable[[Shape], Case]]:
    """name -> function of a shape. A new recurrence adds its file here."""
    from tests.ops.recurrences import delta_rule, gated_slots, linear_attention, ttt

    return {
        **linear_attention.CASES,
        **delta_rule.CASES,
        **gated_slots.CASES,
        **ttt.CASES,
    }
