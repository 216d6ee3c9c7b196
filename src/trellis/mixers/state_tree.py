"""Walks over mixer states: NamedTuples of tensors, None and further such tuples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from .base import State


def map_tensors(function: Callable[[Tensor], Tensor], state: State) -> State:
    """The same structure with `function` applied to every tensor."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return function(state)
    return type(state)(*(map_tensors(function, part) for part in state))


def named_tensors(state: State, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its dotted path, such as "memory.keys"."""
    if isinstance(state, Tensor):
        yield prefix, state
    elif state is not None:
        for name, part in zip(state._fields, state):
            yield from named_tensors(part, f"{prefix}.{name}" if prefix else name)


def rebuild(template: State, tensors: dict[str, Tensor], prefix: str = "") -> Any:
    """A state with the structure of `template` and the tensors of the given paths."""
    if template is None:
        return None
    if isinstance(template, Tensor):
        return tensors[prefix]
    parts = (
        rebuild(part, tensors, f"{prefix}.{name}" if prefix else name)
        for name, part in zip(template._fields, template)
    )
    return type(template)(*parts)
