"""The interface of every mixer and of its state, and the checks of head sizes that mixers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import checks

#: A NamedTuple whose fields are tensors, None or further such tuples. The first dimension of every
#: tensor counts sequences, so that a cache can select, repeat and save the states of any mixer.
State = Any


class Mixer(nn.Module):
    """A layer that mixes tokens along the sequence and returns a state to go on from.

    `forward(x)` equals `forward(x, init_state(batch))`. Feeding a sequence in pieces, each with the
    state that the piece before returned, equals feeding the whole sequence at once.
    """

    o_proj: nn.Linear
    #: Fields of the configuration that a mixer has in the place of a pretrained attention, whose
    #: maps it takes over, unless its user gives others.
    like_attention: ClassVar[dict[str, Any]] = {}

    @property
    def output_projection(self) -> nn.Linear:
        """The last linear map. What it returns is added to the residual stream, so a model draws
        its weights narrower the more layers there are."""
        return self.o_proj

    def forward(
        self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Map x [B, T, dim] to (y [B, T, dim], the state of B sequences after their last token).

        With cu_seqlens [N+1], x is one row [1, T, dim] of N packed sequences, and `state` and the
        returned state are of N sequences. Mixers never see padding.
        """
        raise NotImplementedError

    def init_state(self, batch: int) -> State:
        """The state of `batch` sequences before their first token."""
        raise NotImplementedError

    def state_size(self, tokens: int | None = None) -> float:
        """How many numbers the state of one sequence holds after `tokens` tokens.

        None asks for the largest size after any number of tokens: math.inf if the state grows
        without bound.
        """
        raise NotImplementedError

    def join_states(self, states: Sequence[State]) -> State:
        """One state of all sequences of several states, in their order."""
        return join_tensors(states)

    def flops(self, context: int) -> float:
        """Operations per token of the mixing itself, forward, on average over `context` tokens.

        A multiply-add counts as two. The linear maps of the layer are not included. The number is
        the cost of the recurrence as it is defined, whichever algorithm computes it.
        """
        raise NotImplementedError


def names_without_weight_decay(module: nn.Module) -> set[str]:
    """Names of the parameters, at any depth, that their modules list in `no_weight_decay`."""
    return {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name in getattr(part, "no_weight_decay", ())
    }


def head_dim_of(dim: int, heads: int) -> int:
    """The size of one of `heads` equal heads. Raises ValueError if they do not divide the width."""
    checks.at_least("heads", heads, 1)
    if dim % heads:
        raise ValueError(f"heads must divide the width, {dim}; got {heads}")
    return dim // heads


def expanded_dim(name: str, factor: float, dim: int, what: str) -> int:
    """factor * dim, e.g. expanded_dim("expand_v", 1.5, 16, "key size") = 24.

    Raises ValueError, in which the factor is called `name` and dim `what`, if it is not whole.
    """
    checks.at_least(name, factor, 0, whole=False)
    size = round(factor * dim)
    if size < 1 or abs(size - factor * dim) > 1e-6:
        raise ValueError(
            f"{name} must make a whole number of the {what}, {dim}; got {factor}, which makes "
            f"{factor * dim:g}"
        )
    return size


#: shape -> (width of all keys / width of the model, expand_v, largest head_dim). None is the shape
#: of attention: the model's number of heads, with keys and values of width / heads.
Shapes = dict[str, tuple[float, float, int] | None]


def head_sizes(dim: int, heads: int, config: Any, shapes: Shapes) -> tuple[int, int, int]:
    """The number of heads, and the size of a head's keys and values.

    dim, heads: of the model. config: has `shape`, a name in `shapes`, and, None or in its place,
    `heads`, `head_dim` (of keys) and `expand_v`. Without them a shape has the smallest number of
    heads, 1 or even where there is such a number, that makes keys of at most its largest size.
    """
    shape = shapes[config.shape]
    if shape is None:
        heads, expand_v = config.heads or heads, 1.0
        key_dim = config.head_dim or head_dim_of(dim, heads)
    else:
        share, expand_v, largest = shape
        heads, key_dim = _heads_of(_all_keys(dim, share, config), largest, config)
    if config.expand_v is not None:
        expand_v = config.expand_v
    return heads, key_dim, expanded_dim("expand_v", expand_v, key_dim, "key size")


def _all_keys(dim: int, share: float, config: Any) -> int:
    """The width of all heads' keys together."""
    if share * dim % 1 and not (config.heads and config.head_dim):
        raise ValueError(
            f"shape={config.shape!r} needs a width of which {share:g} is whole; got {dim}. "
            "shape='model' takes any"
        )
    return int(share * dim)


def _heads_of(keys: int, largest: int, config: Any) -> tuple[int, int]:
    """The number of heads that share `keys` channels, and the channels of each."""
    heads, key_dim = config.heads, config.head_dim
    if heads and key_dim:
        return heads, key_dim
    for name, value in (("heads", heads), ("head_dim", key_dim)):
        if value and keys % value:
            raise ValueError(f"{name} must divide the width of all keys, {keys}; got {value}")
    if key_dim:
        return keys // key_dim, key_dim
    if not heads:
        fitting = [n for n in range(1, keys + 1) if keys % n == 0 and keys // n <= largest]
        heads = next((n for n in fitting if n == 1 or n % 2 == 0), fitting[0])
    return heads, keys // heads


def heads_of_slots(dim: int, heads: int) -> int:
    """4, the number of heads in the authors' code of GSA and ABC at every width.

    Where 4 does not divide the width `dim`, it is `heads`, the model's number.
    """
    return heads if dim % 4 else 4


def check_even_head_dim(head_dim: int) -> None:
    """Raise ValueError at an odd head size: rotary positions turn channels in pairs."""
    if head_dim % 2:
        raise ValueError(f"rotary positions need an even head size; got {head_dim}")


def map_tensors(function: Callable[[Tensor], Tensor], state: State) -> State:
    """The same structure with `function` applied to every tensor."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return function(state)
    return type(state)(*(map_tensors(function, part) for part in state))


def join_tensors(states: Sequence[State]) -> State:
    """The same structure, with the sequences of all states behind each other in every tensor."""
    first = states[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return torch.cat(list(states))
    return type(first)(*(join_tensors(parts) for parts in zip(*states)))


def named_tensors(state: State, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a state with its dotted path, such as "memory.keys"."""
    if isinstance(state, Tensor):
        yield prefix, state
    elif state is not None:
        for name, part in zip(state._fields, state):
            yield from named_tensors(part, f"{prefix}.{name}" if prefix else name)


def rebuild(template: State, tensors: dict[str, Tensor], prefix: str = "") -> Any:
    """A state with the structure of `template`, filled with tensors by their dotted paths."""
    if template is None:
        return None
    if isinstance(template, Tensor):
        return tensors[prefix]
    parts = (
        rebuild(part, tensors, f"{prefix}.{name}" if prefix else name)
        for name, part in zip(template._fields, template)
    )
    return type(template)(*parts)
